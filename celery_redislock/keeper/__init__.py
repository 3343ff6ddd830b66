"""Keeps leases alive: one thread per process, whatever the number of locks."""
