"""What happens after a fork; anything unexpected is an error on the standard error output.

``python -m tests.stores.forking store URL OPTIONS``: one store, made and used before four forks, then used by all five
processes. Prints how many operations were answered right.

``python -m tests.stores.forking keeper URL``: a keeper with a lease under ``v1-parent``, and a child of a fork that
keeps one under ``v1-child`` by the same keeper, until the standard input ends.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
import time
import warnings

from celery_redislock.keeper.keeper import Keeper
from celery_redislock.keeper.plan import Hold
from celery_redislock.lease import Contended, Renewal
from celery_redislock.stores.base import LockStore
from celery_redislock.stores.connect import make_store
from tests.local_nodes.waiting import wait_until
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


def fork_store(url: str, options: str) -> None:
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


def keep(keeper: Keeper, store: LockStore, name: str) -> None:
    lock, mine = Lock(f"v1-{name}", "proj.kept"), token(f"call-{name}")
    lease = lock.lease(mine, 1.0)
    sent = time.monotonic()
    granted(store.acquire(lock.ask(mine, 1.0)))
    keeper.hold(Hold(lease, name, sent=sent))


def fork_keeper(url: str) -> None:
    changes: list[object] = []
    store = make_store(url, {}, 5.0)
    keeper = Keeper(store, 5.0, lambda *news: changes.append(news), lambda *_: None)
    keep(keeper, store, "parent")
    wait_until(lambda: keeper.holds()[0].deadline > time.monotonic() + 0.9, "the first renewal")
    child = os.fork()
    if not child:
        status = 1
        try:
            assert keeper.holds() == []
            assert threading.active_count() == 1
            keep(keeper, store, "child")
            sys.stdin.read()
            assert changes == []
            status = 0
        finally:
            os._exit(status)
    print("forked", flush=True)
    assert os.waitpid(child, 0)[1] == 0
    assert changes == []
    assert len(keeper.holds()) == 1


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads about: that is what is tested
    {"store": fork_store, "keeper": fork_keeper}[sys.argv[1]](*sys.argv[2:])
