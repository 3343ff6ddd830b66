"""From a URL, spelt as Celery spells it, to a store."""

from __future__ import annotations

import inspect
import ssl
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, ConnectionPool, SSLConnection
from redis.retry import Retry

from celery_redislock.errors import LockConfigError
from celery_redislock.stores.base import LockStore
from celery_redislock.stores.memory import MemoryStore
from celery_redislock.stores.redis import RedisStore

__all__ = ["make_store", "without_password"]

SCHEMES: Final = ("redis", "rediss", "unix", "redis+socket", "memory")
_CERT_REQS: Final = {"CERT_REQUIRED": "required", "CERT_OPTIONAL": "optional", "CERT_NONE": "none"}
_OURS: Final = ("retry", "retry_on_timeout", "retry_on_error", "decode_responses", "health_check_interval", "parser_class")
"""What a client may not set here: retries, decoding and liveness are the store's own business."""


def make_store(url: str, options: Mapping[str, Any], timeout: float, *, setting: str = "redislock_url") -> LockStore:
    """Return the store behind ``url``; nothing is connected yet.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+socket://``, or ``memory://`` (tests, one process).
        options: Keywords for redis-py's connections.
        timeout: Bound for one operation, s.
        setting: Where the URL stands, for error messages.

    Raises:
        LockConfigError: The URL or an option is wrong.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise LockConfigError(f"{setting}: {scheme!r} is not a scheme this version can lock on; use {', '.join(SCHEMES)}")
    if scheme == "memory":
        return MemoryStore()
    wait = RedisStore.try_timeout(timeout)
    keywords: dict[str, Any] = {"socket_timeout": wait, "socket_connect_timeout": wait, **_quiet(), **_checked(options)}
    keywords |= {"retry": Retry(NoBackoff(), 0), "decode_responses": False, "health_check_interval": 0}
    try:
        pool = ConnectionPool.from_url(_redis_url(url), **keywords)
        pool.connection_class(**pool.connection_kwargs)  # redis-py looks at the keywords only now
    except (ValueError, TypeError, OSError) as error:
        raise LockConfigError(f"{setting} or redislock_options: {without_password(url)}: {error}") from None
    return RedisStore(pool, timeout)


def without_password(url: str) -> str:
    """Return ``url`` fit for logs: user information and query are gone."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in _OURS:
        if name in options:
            raise LockConfigError(f"redislock_options: {name!r} can't be set; the lock store decides that itself")
    return dict(options)


def _quiet() -> dict[str, Any]:
    """Keywords that keep a new connection from asking the server things that a lock does not need."""
    known = inspect.signature(AbstractConnection.__init__).parameters
    quiet: dict[str, Any] = {"protocol": 2}
    quiet |= {"driver_info": None} if "driver_info" in known else {"lib_name": None, "lib_version": None}
    return quiet


def _redis_url(url: str) -> str:
    """Translate Celery's spellings: ``redis+socket://`` with ``virtual_host``, ``ssl_cert_reqs=CERT_NONE``."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    scheme = parts.scheme
    if scheme == "redis+socket":
        scheme = "unix"
        if "virtual_host" in query:
            query["db"] = query.pop("virtual_host").strip("/")
    if "ssl_cert_reqs" in query:
        query["ssl_cert_reqs"] = _CERT_REQS.get(query["ssl_cert_reqs"], query["ssl_cert_reqs"])
    # put together by hand: urlunsplit drops the empty host of unix:///path
    return f"{scheme}://{parts.netloc}{parts.path}" + (f"?{urlencode(query)}" if query else "")


def ssl_keywords(use_ssl: Any) -> dict[str, Any]:
    """Return connection keywords for Celery's ``redis_backend_use_ssl`` / ``broker_use_ssl``."""
    if not use_ssl:
        return {}
    keywords = dict(use_ssl) if isinstance(use_ssl, Mapping) else {}
    reqs = keywords.get("ssl_cert_reqs")
    if isinstance(reqs, ssl.VerifyMode):
        keywords["ssl_cert_reqs"] = reqs.name.removeprefix("CERT_").lower()
    elif isinstance(reqs, str):
        keywords["ssl_cert_reqs"] = _CERT_REQS.get(reqs, reqs)
    return {"connection_class": SSLConnection, **keywords}
