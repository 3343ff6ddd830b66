"""What the app's settings say: read once, validated, with the name of the setting in each error."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from celery_redislock.errors import LockConfigError
from celery_redislock.options import OPTION_NAMES, PER_TASK, show, unknown_option

__all__ = ["Settings", "warn_of_unknown"]

logger = logging.getLogger(__name__)

_WHO: Final = "the app's settings"
_OWN: Final = ("url", "prefix", "options", "timeout", "eager")
_FOR_ALL_TASKS: Final = tuple(name for name in OPTION_NAMES if name not in PER_TASK)
KNOWN: Final = tuple(f"redislock_{name}" for name in (*_OWN, *_FOR_ALL_TASKS))
_REDIS: Final = ("redis://", "rediss://", "redis+socket://", "unix://")
DEFAULT_TIMEOUT: Final = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The app's part of the configuration.

    Attributes:
        url: Where the locks live; may hold a password, so it is not shown.
        url_setting: Name of the setting that the URL came from.
        prefix: What every key begins with, the transport's ``global_keyprefix`` included.
        client_options: Keywords for redis-py's connections.
        use_ssl: What ``redis_backend_use_ssl`` or ``broker_use_ssl`` says, where the URL came from there.
        timeout: Bound for one lock operation, s.
        eager: Take locks in eager mode, too.
        defaults: Raw values of task options by bare name.
    """

    url: str = field(repr=False)
    url_setting: str
    prefix: str
    client_options: Mapping[str, Any] = field(repr=False)
    use_ssl: Mapping[str, Any] | None = field(repr=False)
    timeout: float
    eager: bool
    defaults: Mapping[str, Any]

    @classmethod
    def read(cls, conf: Any) -> Settings:
        """Read a Celery app's ``conf`` (any namespace).

        Raises:
            LockConfigError: A setting is wrong, or there is no Redis to lock on.
        """
        url, url_setting = _url(conf)
        return cls(
            url=url,
            url_setting=url_setting,
            prefix=_keyprefix(conf, url_setting) + _prefix(conf),
            client_options={**_credentials(conf, url_setting), **_options(conf)},
            use_ssl=_use_ssl(conf, url_setting),
            timeout=_timeout(conf),
            eager=_eager(conf),
            defaults=_defaults(conf),
        )


def warn_of_unknown(names: Iterable[str], namespace: str | None) -> None:
    """Warn of settings that look like ours and are not read: misspelt, or not in the case that Celery looks for.

    Args:
        names: Keys of the app's configuration.
        namespace: The prefix Celery was told to look for, such as ``"CELERY_"``, or None.
    """
    prefix = (namespace or "").lower()
    upper = namespace is not None and namespace.isupper()
    read = {name: (prefix + name).upper() if upper else prefix + name for name in KNOWN}
    for name in map(str, names):
        plain = name.lower().removeprefix(prefix)
        if plain in read:
            if name not in (plain, read[plain]):
                logger.warning("%s: %s is not read; Celery looks for %s", _WHO, name, read[plain])
        elif plain.startswith("redislock_"):
            logger.warning("%s", unknown_option(_WHO, plain, KNOWN))


def _url(conf: Any) -> tuple[str, str]:
    if (url := conf.get("redislock_url")) is not None:
        if not isinstance(url, str) or "://" not in url:
            raise LockConfigError("redislock_url is not a URL; write redis://host:6379/0")
        return url, "redislock_url"
    for name in ("result_backend", "broker_url"):
        candidate = getattr(conf, name, None)
        if isinstance(candidate, str) and candidate.startswith(_REDIS) and ";" not in candidate:
            return candidate, name
    raise LockConfigError(
        "there is no Redis to lock on: neither the result backend nor the broker is the URL of one Redis server "
        '(of several, say which). Set redislock_url = "redis://host:6379/0"'
    )


def _keyprefix(conf: Any, url_setting: str) -> str:
    sources = ("result_backend", "broker_url") if url_setting == "redislock_url" else (url_setting,)
    for source in sources:
        setting = "result_backend_transport_options" if source == "result_backend" else "broker_transport_options"
        if prefix := (conf.get(setting) or {}).get("global_keyprefix"):
            return str(prefix)
    return ""


def _prefix(conf: Any) -> str:
    prefix = conf.get("redislock_prefix", "redislock")
    if not isinstance(prefix, str) or not prefix.strip():
        raise LockConfigError('redislock_prefix is not a non-empty string; leave it out for "redislock"')
    return prefix


def _credentials(conf: Any, url_setting: str) -> dict[str, Any]:
    """Return what Celery gives a result backend whose URL names no user or password."""
    if url_setting != "result_backend":
        return {}
    found = {name: conf.get(f"redis_{name}") for name in ("username", "password")}
    return {name: value for name, value in found.items() if value}


def _options(conf: Any) -> Mapping[str, Any]:
    options = conf.get("redislock_options")
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise LockConfigError("redislock_options is not a mapping of keywords for the Redis client")
    return options


def _use_ssl(conf: Any, url_setting: str) -> Mapping[str, Any] | None:
    setting = {"result_backend": "redis_backend_use_ssl", "broker_url": "broker_use_ssl"}.get(url_setting)
    use_ssl = conf.get(setting) if setting else None
    if not use_ssl:
        return None
    if not isinstance(use_ssl, Mapping):
        # for broker_use_ssl = True kombu connects to Redis without TLS, and says nothing
        raise LockConfigError(
            f'{setting} is not a mapping: for Redis write {{"ssl_cert_reqs": "required"}}, with ssl_ca_certs, '
            "ssl_certfile and ssl_keyfile as needed; or give the locks a redislock_url of their own"
        )
    return use_ssl


def _timeout(conf: Any) -> float:
    timeout = conf.get("redislock_timeout", DEFAULT_TIMEOUT)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0.05 <= timeout <= 300:
        raise LockConfigError(f"redislock_timeout={show(timeout)} is not a number of seconds from 0.05 to 300")
    return float(timeout)


def _eager(conf: Any) -> bool:
    eager = conf.get("redislock_eager", False)
    if not isinstance(eager, bool):
        raise LockConfigError(f"redislock_eager={show(eager)} is not True or False")
    return eager


def _defaults(conf: Any) -> dict[str, Any]:
    for name in sorted(PER_TASK):
        if f"redislock_{name}" in conf:
            raise unknown_option(_WHO, f"redislock_{name}", KNOWN)
    return {name: conf[f"redislock_{name}"] for name in _FOR_ALL_TASKS if f"redislock_{name}" in conf}
