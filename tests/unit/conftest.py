"""Unit tests need no server and no patience: time is handed in, and nothing sleeps."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", deadline=None)  # a busy machine is not a failing test
settings.load_profile("unit")
