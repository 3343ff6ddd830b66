"""Whoever wants to see what happens to locks. Nothing here can hurt a task."""
