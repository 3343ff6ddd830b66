"""``python -m tests.stores.forking URL OPTIONS``: one store, made and used before four forks, then used by all five.

Prints how many operations were answered right; anything else is an error on the standard error output.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
import warnings

from celery_redislock.lease import Contended, Renewal
from celery_redislock.stores.base import LockStore
from celery_redislock.stores.connect import make_store
from tests.stores.harness import Lock, granted, token

CHILDREN = 4
ROUNDS = 50  # of four operations each


def use(store: LockStore, number: int) -> None:
    """Each answer is one that only the asker's own question can have."""
    for n in range(ROUNDS):
        lock, mine = Lock(f"v1-{number}-{n}", "proj.forked"), token(f"call-{number}-{n}")
        granted(store.acquire(lock.ask(mine)))
        denied = store.acquire(lock.ask(token()))
        assert isinstance(denied, Contended)
        assert (denied.holder.task_id, denied.holder.pid) == (mine.task_id, os.getpid()), denied
        assert store.renew([lock.lease(mine)], 5.0) == [Renewal(held=True)]
        assert store.release(lock.release(mine)).owned


def main(url: str, options: str) -> None:
    store = make_store(url, ast.literal_eval(options), 5.0)
    threads = [threading.Thread(target=use, args=(store, number)) for number in (1001, 1002)]
    store.renew([Lock().lease(token())], 5.0)
    for thread in threads:
        # renewals belong to one thread at a time; what these two leave behind is idle connections
        thread.start()
        thread.join()
    children = []
    for number in range(CHILDREN):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                use(store, number)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    use(store, CHILDREN)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    assert statuses == [0] * CHILDREN, statuses
    print(CHILDREN + 1, "processes", (CHILDREN + 1) * ROUNDS * 4, "operations")


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads about: that is what is tested
    main(*sys.argv[1:])
