"""The app that worker processes load (``celery -A tests.local_nodes.app worker``), configured by the environment.

``REDISLOCK_TEST_CONF`` is JSON: any Celery settings, broker and result backend among them. The test process has the
variable not, and makes its own app from the same settings with ``make_app``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from celery import Celery

CONF = "REDISLOCK_TEST_CONF"
TASKS = "tests.local_nodes.tasks"


def make_app(conf: Mapping[str, Any], name: str = "redislock_tests") -> Celery:
    """A new app, made the current one, with the tasks of ``tasks.py`` and of the modules in ``conf["include"]``."""
    app = Celery(name)
    app.conf.update({**conf, "include": list(dict.fromkeys([TASKS, *conf.get("include", ())]))})
    return app


def redeliver_soon() -> None:
    """Older kombu looks for messages past their visibility timeout each 100 s and has no settings for it: each 1 s."""
    from kombu.transport import redis

    if hasattr(redis.Channel, "unacked_restore_interval"):
        return  # fixtures.py sets it
    restore_visible, register = redis.QoS.restore_visible, redis.Transport.register_with_event_loop

    def restore_each_time(self: Any, start: int = 0, num: int = 10, interval: int = 10) -> None:
        restore_visible(self, start, num, 1)

    def register_a_quicker_timer(self: Any, connection: Any, loop: Any) -> None:
        register(self, connection, loop)
        loop.call_repeatedly(1, self.cycle.maybe_restore_messages)

    redis.QoS.restore_visible = restore_each_time
    redis.Transport.register_with_event_loop = register_a_quicker_timer


if CONF in os.environ:
    redeliver_soon()
    app = make_app(json.loads(os.environ[CONF]))
