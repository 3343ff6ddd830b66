"""The Celery app: ``celery -A example_project.app worker``."""

from celery import Celery

import example_project.eventlog  # noqa: F401  its signal receivers write the event log in every process

app = Celery("example_project", config_source="example_project.celeryconfig")
