"""Celery workers, brokers and result stores as processes of this machine: fixtures in ``tests/conftest.py``.

``fixtures.py`` what most tests use · ``nodes.py`` the same as pytest-celery's ``celery_setup`` · ``worker.py`` one
worker process · ``recorder.py`` which task bodies ran, and which ran at once · ``app.py``, ``tasks.py`` what workers
load · ``waiting.py``, ``require.py`` small helpers.
"""
