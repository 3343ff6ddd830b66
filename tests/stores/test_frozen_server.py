"""What a frozen server is sent it executes after the thaw, be the script known to it or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_redislock import LockUnavailable
from celery_redislock.lease import Acquired, Lease, Token
from celery_redislock.stores.base import Ask, Release
from celery_redislock.stores.connect import make_store
from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.waiting import wait_until


def test_a_release_that_nobody_waits_for_any_more_frees_the_key(make_server: Callable[..., EmbeddedServer]) -> None:
    server = make_server()
    store = make_store(server.url, {}, 1.0)
    token = Token.new("id", 0, "worker", 1, 1)
    lease = Lease("redislock:{name}:id", token.encode(), 60.0)
    grant = store.acquire(Ask(lease, "redislock:{name}:fence", token.tombstone_prefix))
    assert isinstance(grant, Acquired)
    server.pause()  # before it has ever seen the script that releases
    with pytest.raises(LockUnavailable):
        store.release(Release(lease, tombstone=f"-{lease.token}"))
    server.resume()
    wait_until(lambda: server.command("EXISTS", lease.key) == b"0", "the key to go")
    store.close()
