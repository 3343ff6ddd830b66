"""From a URL, spelt as Celery spells it, to a store."""

from __future__ import annotations

import inspect
import re
import ssl
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.backoff import NoBackoff
from redis.connection import URL_QUERY_ARGUMENT_PARSERS, AbstractConnection, ConnectionPool, SSLConnection
from redis.exceptions import RedisError
from redis.retry import Retry

from celery_redislock.errors import LockConfigError
from celery_redislock.stores.base import LockStore
from celery_redislock.stores.memory import MemoryStore
from celery_redislock.stores.redis import RedisStore

__all__ = ["make_store", "ssl_keywords", "without_password"]

SCHEMES: Final = ("redis", "rediss", "unix", "redis+socket", "memory")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CERT_REQS: Final[dict[object, str]] = {
    name: mode.name.removeprefix("CERT_").lower()
    for mode in ssl.VerifyMode
    for name in (mode, mode.name, mode.name.removeprefix("CERT_").lower())
} | {None: "none"}
_OURS: Final = {
    "socket_timeout": "redislock_timeout bounds each operation",
    "socket_connect_timeout": "redislock_timeout bounds each operation",
    "timeout": "redislock_timeout bounds each operation",
    "retry": "the lock store tries again by itself, within redislock_timeout",
    "retry_on_timeout": "the lock store tries again by itself, within redislock_timeout",
    "retry_on_error": "the lock store tries again by itself, within redislock_timeout",
    "health_check_interval": "the lock store notices a dead connection by itself",
    "decode_responses": "the lock store reads bytes",
    "parser_class": "the lock store reads bytes",
}
"""What a client may not set here, and why not."""
_IN_URL: Final = ("host", "port", "path", "db")
_HOW_TO_WRITE: Final = (
    "write redis://user:password@host:6379/0, and percent-encode special characters of the password (urllib's quote)"
)


def make_store(url: str, options: Mapping[str, Any], timeout: float, *, setting: str = "redislock_url") -> LockStore:
    """Return the store behind ``url``; nothing is connected yet.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+socket://``, or ``memory://`` (tests, one process).
        options: Keywords for redis-py's connections.
        timeout: Bound for one operation, s.
        setting: Where the URL stands, for error messages. Keywords in the query of one that is not our own are meant
            for Celery's connections; those that we have to decide are left out then.

    Raises:
        LockConfigError: The URL or an option is wrong.
    """
    found = _SCHEME.match(url)
    scheme = found[1] if found else ""
    if scheme not in SCHEMES:
        raise LockConfigError(f"{setting}: {scheme!r} is not a scheme that locks can use; use {', '.join(SCHEMES)}")
    if scheme == "memory":
        return MemoryStore()
    _refuse(options, "redislock_options")
    for name in _IN_URL:
        if name in options:
            raise LockConfigError(f"redislock_options: {name!r} belongs into the URL ({setting})")
    address, query = _take_apart(url, setting)
    if setting == "redislock_url":
        _refuse(query, setting)
    wait = RedisStore.try_timeout(timeout)
    keywords: dict[str, Any] = {
        "max_connections": 2**31,  # redis-py 8: 100. As many are open as threads or greenlets ask at the same time
        **_quiet(),
        **options,
        **{name: value for name, value in query.items() if name not in _OURS},
        "socket_timeout": wait,
        "socket_connect_timeout": wait,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": False,
        "health_check_interval": 0,
    }
    _check_values(keywords, f"{setting} or redislock_options")
    try:
        pool = ConnectionPool.from_url(address, **keywords)
        pool.connection_class(**pool.connection_kwargs)  # redis-py looks at the keywords only now
    except (ValueError, TypeError, OSError, RedisError) as error:
        raise LockConfigError(f"{setting} or redislock_options: {without_password(url)}: {error}") from None
    return RedisStore(pool, timeout)


def without_password(url: str) -> str:
    """Return ``url`` fit for logs: user information and query are gone. What can't be told apart is gone, too."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "..."
    address, *behind = re.split(r"[?#]", rest, maxsplit=1)
    return f"{scheme}://" + ("..." if behind and "@" in behind[0] else address.rpartition("@")[2])


def ssl_keywords(use_ssl: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return connection keywords for Celery's ``redis_backend_use_ssl`` / ``broker_use_ssl``.

    As in Celery, they switch TLS on for a ``redis://`` URL, too.
    """
    return {"connection_class": SSLConnection, **use_ssl} if use_ssl else {}


def _refuse(names: Iterable[str], where: str) -> None:
    for name in names:
        if name in _OURS:
            raise LockConfigError(f"{where}: {name!r} can't be set; {_OURS[name]}")


def _quiet() -> dict[str, Any]:
    """Keywords that keep a new connection from asking the server things that a lock does not need."""
    known = inspect.signature(AbstractConnection.__init__).parameters
    quiet: dict[str, Any] = {"protocol": 2}
    quiet |= {"driver_info": None} if "driver_info" in known else {"lib_name": None, "lib_version": None}
    return quiet


def _take_apart(url: str, setting: str) -> tuple[str, dict[str, Any]]:
    """Translate Celery's spellings: return a URL without query that redis-py reads, and the query as keywords.

    Errors do not quote the URL: where it can't be read, any part of it may be part of a password.
    """
    try:
        parts = urlsplit(url)
        scheme, host, _ = parts.scheme, parts.hostname, parts.port  # each is checked when it is read
        query: dict[str, Any] = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        raise _unreadable(setting) from None
    if "#" in url or "@" in parts.query:  # what comes before it is a piece of the password, not a host
        raise _unreadable(setting)
    database = query.pop("virtual_host", None)
    if scheme in ("unix", "redis+socket"):
        scheme = "unix"
        if host or not parts.path.strip("/"):
            raise LockConfigError(f"{setting} names no socket; write three slashes, as in unix:///run/redis.sock?db=0")
    else:
        database = unquote(parts.path) if database is None else database
        if any(name.startswith("ssl_") for name in query):
            scheme = "rediss"  # as kombu reads it; never a plain connection where certificates are spoken of
    database = str(query.pop("db", database) or "").strip("/")
    if not re.fullmatch(r"[0-9]{0,9}", database):
        raise LockConfigError(f"{setting} ends in something that is not a database number; {_HOW_TO_WRITE}")
    keywords: dict[str, Any] = {"db": int(database or 0)}
    parsers: Mapping[str, Any] = URL_QUERY_ARGUMENT_PARSERS
    for name, text in query.items():
        try:
            keywords[name] = parsers.get(name, str)(text)
        except (ValueError, TypeError):
            raise LockConfigError(f"{setting}: {name} in the URL's query has a wrong value") from None
    # put together by hand: urlunsplit drops the empty host of unix:///path
    return f"{scheme}://{parts.netloc}{parts.path if scheme == 'unix' else ''}", keywords


def _unreadable(setting: str) -> LockConfigError:
    return LockConfigError(f"{setting} is not a URL that can be read; {_HOW_TO_WRITE}")


def _check_values(keywords: dict[str, Any], where: str) -> None:
    """Bring ``ssl_cert_reqs`` into redis-py's form, and refuse what it would stumble over only when it connects."""
    if "ssl_cert_reqs" in keywords:
        asked = keywords["ssl_cert_reqs"]
        known = _CERT_REQS.get(asked) if isinstance(asked, str | ssl.VerifyMode | None) else None
        if known is None:
            raise LockConfigError(f"{where}: ssl_cert_reqs is none of required, optional, none")
        keywords["ssl_cert_reqs"] = known
        if known == "none":
            keywords["ssl_check_hostname"] = False  # Python refuses to check a name in what it does not verify
    if str(keywords["protocol"]) not in ("2", "3"):
        raise LockConfigError(f"{where}: protocol is neither 2 nor 3")
    provider = keywords.get("credential_provider")
    if provider is not None and not hasattr(provider, "get_credentials"):
        raise LockConfigError(
            f"{where}: credential_provider is not an instance of one of redis-py's credential providers"
        )
