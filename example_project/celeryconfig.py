"""Settings of the application: plain Celery ones, and two of celery-redislock."""

import os

broker_url = result_backend = os.environ.get("EXAMPLE_REDIS_URL", "redis://localhost:6379/0")
include = ["example_project.tasks"]

task_acks_late = task_reject_on_worker_lost = True  # a call whose process is killed is delivered again
worker_prefetch_multiplier = 1
broker_connection_retry_on_startup = True

# The locks live in the result backend, because that is a Redis: no further setting is needed.
redislock_ttl = 5  # seconds for which a process that is killed can block its lock; the default is 30
redislock_enabled = "EXAMPLE_WITHOUT_LOCKS" not in os.environ  # what the application would be without the library

# Started on two machines, lest one that is down costs us the rates; each beat sends all of this.
beat_schedule = {
    "refresh-rates": {"task": "example_project.tasks.refresh_rates", "schedule": 3.0},
}
