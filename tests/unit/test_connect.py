"""celery_redislock.stores.connect: every spelling of a URL that Celery knows, and no password in any message."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from redis import SSLConnection, UnixDomainSocketConnection
from redis.connection import Connection
from redis.credentials import UsernamePasswordCredentialProvider

from celery_redislock.errors import LockConfigError
from celery_redislock.runtime import Runtime
from celery_redislock.stores import connect
from celery_redislock.stores.connect import make_store, ssl_keywords, without_password
from celery_redislock.stores.memory import MemoryStore
from celery_redislock.stores.redis import RedisStore

SECRET = "s3cr3t"


def pool(url: str, options: dict[str, Any] | None = None, timeout: float = 3.0, **kwargs: Any) -> Any:
    """The connection pool behind a URL."""
    store = make_store(url, options or {}, timeout, **kwargs)
    assert isinstance(store, RedisStore)
    return store._pool


def refusal(url: str, options: dict[str, Any] | None = None, **kwargs: Any) -> str:
    with pytest.raises(LockConfigError) as caught:
        make_store(url, options or {}, 3.0, **kwargs)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


def said(made: Any) -> dict[str, Any]:
    """What a pool was told of the address."""
    names = ("host", "port", "path", "db", "username", "password")
    return {name: made.connection_kwargs[name] for name in names if name in made.connection_kwargs}


# --- spellings


@pytest.mark.parametrize(
    ("url", "kind", "address"),
    [
        ("redis://", Connection, {"db": 0}),
        ("redis://h", Connection, {"host": "h", "db": 0}),
        ("redis://h/", Connection, {"host": "h", "db": 0}),
        ("redis://h:6380/3", Connection, {"host": "h", "port": 6380, "db": 3}),
        ("redis://h:6380//3", Connection, {"host": "h", "port": 6380, "db": 3}),
        ("redis://h?db=4", Connection, {"host": "h", "db": 4}),
        ("redis://h/3?db=4", Connection, {"host": "h", "db": 4}),
        ("redis://h?virtual_host=/5", Connection, {"host": "h", "db": 5}),
        ("redis://h?virtual_host=", Connection, {"host": "h", "db": 0}),
        ("redis://[::1]:6380/1", Connection, {"host": "::1", "port": 6380, "db": 1}),
        ("redis://:pw@h/1", Connection, {"host": "h", "db": 1, "password": "pw"}),
        ("redis://user:pw@h/1", Connection, {"host": "h", "db": 1, "username": "user", "password": "pw"}),
        ("redis://user@h/1", Connection, {"host": "h", "db": 1, "username": "user"}),
        ("redis://:p%40%2F%23%3F%25%3A@h/1", Connection, {"host": "h", "db": 1, "password": "p@/#?%:"}),
        ("redis://:p%2540@h/1", Connection, {"host": "h", "db": 1, "password": "p%40"}),
        (
            "redis://h/1?username=u&password=p%2540",
            Connection,
            {"host": "h", "db": 1, "username": "u", "password": "p%40"},
        ),
        ("rediss://h/1", SSLConnection, {"host": "h", "db": 1}),
        ("unix:///run/redis.sock", UnixDomainSocketConnection, {"path": "/run/redis.sock", "db": 0}),
        ("unix:///run/redis.sock?db=2", UnixDomainSocketConnection, {"path": "/run/redis.sock", "db": 2}),
        ("unix:///run/my%20redis.sock", UnixDomainSocketConnection, {"path": "/run/my redis.sock", "db": 0}),
        (
            "unix://user:p%40w@/run/redis.sock?db=2",
            UnixDomainSocketConnection,
            {"path": "/run/redis.sock", "db": 2, "username": "user", "password": "p@w"},
        ),
        ("redis+socket:///run/redis.sock", UnixDomainSocketConnection, {"path": "/run/redis.sock", "db": 0}),
        (
            "redis+socket:///run/redis.sock?virtual_host=2",
            UnixDomainSocketConnection,
            {"path": "/run/redis.sock", "db": 2},
        ),
        (
            "redis+socket:///run/redis.sock?virtual_host=/2",
            UnixDomainSocketConnection,
            {"path": "/run/redis.sock", "db": 2},
        ),
        (
            "redis+socket://:pw@/run/redis.sock?virtual_host=2",
            UnixDomainSocketConnection,
            {"path": "/run/redis.sock", "db": 2, "password": "pw"},
        ),
    ],
)
def test_each_spelling_gives_the_right_kind_of_connection(url: str, kind: type, address: dict[str, Any]) -> None:
    made = pool(url)
    assert made.connection_class is kind
    assert said(made) == address


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:6380/3",
        "redis://user:p%40%2Fw%25@h/1",
        "redis://h//4",
        "redis+socket:///run/redis.sock?virtual_host=2",
        "redis+socket:///run/redis.sock?virtual_host=/2",
        "rediss://:pw@h:6380/3?ssl_cert_reqs=CERT_NONE",
        "rediss://h/3?ssl_cert_reqs=required&ssl_ca_certs=%2Fetc%2Fca.pem",
    ],
)
def test_celery_reads_the_same_address_in_its_result_backends_url(url: str) -> None:
    app = Celery("oracle", set_as_current=False)
    app.conf.result_backend = url
    theirs = app.backend.connparams
    ours = pool(url, setting="result_backend")
    assert ours.connection_class is theirs.get("connection_class", Connection)
    defaults = {"host": "localhost", "port": 6379, "username": None, "password": None, "ssl_ca_certs": None}
    for name in ("host", "port", "path", "db", "username", "password", "ssl_ca_certs"):
        default = defaults.get(name)
        assert ours.connection_kwargs.get(name, default) == (theirs.get(name) or (0 if name == "db" else default)), name


def test_memory_is_a_store_in_this_process() -> None:
    assert isinstance(make_store("memory://", {}, 3.0), MemoryStore)


def test_making_a_store_connects_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(Connection, "connect", fail)
    monkeypatch.setattr(UnixDomainSocketConnection, "connect", fail)
    for url in ("redis://h", "rediss://h", "unix:///s"):
        make_store(url, {}, 3.0)


# --- what the store decides


@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "unix:///s"])
def test_waiting_trying_again_and_decoding_are_the_stores_own_business(url: str) -> None:
    keywords = pool(url, timeout=6.0).connection_kwargs
    assert keywords["socket_timeout"] == keywords["socket_connect_timeout"] == 2.0
    assert keywords["retry"]._retries == 0
    assert keywords["decode_responses"] is False
    assert keywords["health_check_interval"] == 0


OURS = {
    "socket_timeout": 60,
    "socket_connect_timeout": 60,
    "timeout": 60,
    "retry": None,
    "retry_on_timeout": True,
    "retry_on_error": [],
    "health_check_interval": 25,
    "decode_responses": True,
    "parser_class": object,
}


@pytest.mark.parametrize("name", OURS)
def test_these_are_refused_as_options(name: str) -> None:
    message = refusal("redis://h", {name: OURS[name]})
    assert message.startswith(f"redislock_options: {name!r} can't be set; ")
    assert ("redislock_timeout" in message) == (name.startswith(("socket", "retry")) or name == "timeout")


@pytest.mark.parametrize("name", OURS)
def test_these_are_refused_in_the_query_of_our_own_url(name: str) -> None:
    assert refusal(f"redis://h?{name}=1").startswith(f"redislock_url: {name!r} can't be set; ")


@pytest.mark.parametrize("setting", ["result_backend", "broker_url"])
@pytest.mark.parametrize("name", OURS)
def test_in_the_query_of_celerys_own_url_they_are_about_celerys_connections(name: str, setting: str) -> None:
    plain = pool("redis://h", setting=setting).connection_kwargs
    made = pool(f"redis://h?{name}=1", setting=setting).connection_kwargs
    assert set(made) == set(plain)
    assert made["retry"]._retries == 0
    for ours in set(OURS) & set(made) - {"retry"}:
        assert made[ours] == plain[ours]


@pytest.mark.parametrize(("name", "value"), [("host", "h"), ("port", 6379), ("path", "/s"), ("db", 3)])
def test_parts_of_the_address_belong_into_the_url(name: str, value: object) -> None:
    assert refusal("redis://h/0", {name: value}) == f"redislock_options: {name!r} belongs into the URL (redislock_url)"


def test_other_options_reach_the_connection() -> None:
    keywords = pool("redis://h", {"username": "u", "password": SECRET, "client_name": "locks"}).connection_kwargs
    assert (keywords["username"], keywords["password"], keywords["client_name"]) == ("u", SECRET, "locks")


def test_what_the_url_says_wins_over_options() -> None:
    assert said(pool("redis://:own@h", {"password": SECRET}))["password"] == "own"


def test_words_in_the_query_become_what_they_mean() -> None:
    keywords = pool("redis://h?socket_keepalive=no&client_name=a+b&max_connections=7").connection_kwargs
    assert keywords["socket_keepalive"] is False
    assert keywords["client_name"] == "a b"
    assert pool("redis://h?max_connections=7").max_connections == 7


# --- TLS


def verify_mode(made: Any) -> Any:
    connection = made.connection_class(**made.connection_kwargs)
    return connection.cert_reqs


@pytest.mark.parametrize(
    ("written", "mode"),
    [
        ("CERT_REQUIRED", ssl.CERT_REQUIRED),
        ("CERT_OPTIONAL", ssl.CERT_OPTIONAL),
        ("CERT_NONE", ssl.CERT_NONE),
        ("required", ssl.CERT_REQUIRED),
        ("optional", ssl.CERT_OPTIONAL),
        ("none", ssl.CERT_NONE),
    ],
)
def test_certificates_are_checked_as_the_url_says_in_either_spelling(written: str, mode: ssl.VerifyMode) -> None:
    assert verify_mode(pool(f"rediss://h?ssl_cert_reqs={written}")) == mode
    assert verify_mode(pool("rediss://h", {"ssl_cert_reqs": written})) == mode
    assert verify_mode(pool("redis://h", ssl_keywords({"ssl_cert_reqs": written}))) == mode
    assert verify_mode(pool("redis://h", ssl_keywords({"ssl_cert_reqs": mode}))) == mode


def test_certificates_are_checked_if_nothing_is_said() -> None:
    assert verify_mode(pool("rediss://h")) == ssl.CERT_REQUIRED
    assert verify_mode(pool("redis://h", ssl_keywords({"ssl_ca_certs": "ca.pem"}))) == ssl.CERT_REQUIRED


def test_none_means_that_nothing_is_checked_as_in_redis_py() -> None:
    assert verify_mode(pool("redis://h", ssl_keywords({"ssl_cert_reqs": None}))) == ssl.CERT_NONE


@pytest.mark.parametrize("value", ["CERT_MAYBE", "", "REQUIRED", 2, True, ["required"]])
def test_another_word_for_certificates_is_refused(value: object) -> None:
    where = "redislock_url or redislock_options: ssl_cert_reqs is none of required, optional, none"
    assert refusal("rediss://h", {"ssl_cert_reqs": value}) == where


def test_another_word_for_certificates_in_the_url_is_refused() -> None:
    message = refusal("rediss://h?ssl_cert_reqs=CERT_MAYBE", setting="broker_url")
    assert message == "broker_url or redislock_options: ssl_cert_reqs is none of required, optional, none"


def test_a_name_is_not_checked_in_a_certificate_that_is_not() -> None:
    keywords = pool("rediss://h?ssl_cert_reqs=none&ssl_check_hostname=true").connection_kwargs
    assert keywords["ssl_check_hostname"] is False
    assert pool("rediss://h?ssl_check_hostname=true").connection_kwargs["ssl_check_hostname"] is True


def test_a_url_that_speaks_of_certificates_never_gives_a_plain_connection() -> None:
    made = pool("redis://h/1?ssl_cert_reqs=required&ssl_ca_certs=%2Fca.pem", setting="broker_url")
    assert made.connection_class is SSLConnection
    assert made.connection_kwargs["ssl_ca_certs"] == "/ca.pem"


@pytest.mark.parametrize("nothing", [None, {}, False])
def test_without_use_ssl_there_is_nothing_to_add(nothing: Any) -> None:
    assert ssl_keywords(nothing) == {}


def test_use_ssl_switches_tls_on_for_a_plain_url_and_is_left_as_it_is() -> None:
    use_ssl = {"ssl_cert_reqs": ssl.CERT_NONE, "ssl_ca_certs": "ca.pem"}
    made = pool("redis://h/1", ssl_keywords(use_ssl))
    assert made.connection_class is SSLConnection
    assert said(made) == {"host": "h", "db": 1}
    assert use_ssl == {"ssl_cert_reqs": ssl.CERT_NONE, "ssl_ca_certs": "ca.pem"}


def test_tls_over_a_unix_socket_is_refused() -> None:
    assert refusal("unix:///s", ssl_keywords({"ssl_cert_reqs": "none"})).startswith("redislock_url or ")


@pytest.fixture
def app_store() -> Iterator[Callable[..., RedisStore]]:
    """``app_store(**conf)``: the store of an app with these settings."""
    apps = []

    def make(**conf: Any) -> RedisStore:
        app = Celery("tls", set_as_current=False)
        app.conf.update(conf)
        apps.append(app)
        store = Runtime.of(app).store
        assert isinstance(store, RedisStore)
        return store

    yield make
    for app in apps:
        Runtime.forget(app)


@pytest.mark.parametrize(
    ("conf", "kind"),
    [
        ({"broker_url": "redis://h/0"}, Connection),
        ({"broker_url": "redis://h/0", "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_NONE}}, SSLConnection),
        ({"broker_url": "redis://h/0", "redis_backend_use_ssl": {"ssl_cert_reqs": ssl.CERT_NONE}}, Connection),
        ({"result_backend": "redis://h/0", "redis_backend_use_ssl": {"ssl_cert_reqs": "none"}}, SSLConnection),
        ({"result_backend": "redis://h/0", "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_NONE}}, Connection),
        ({"result_backend": "rediss://h/0?ssl_cert_reqs=CERT_NONE"}, SSLConnection),
        ({"redislock_url": "redis://h/0", "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_NONE}}, Connection),
        ({"redislock_url": "rediss://h/0", "redislock_options": {"ssl_cert_reqs": "none"}}, SSLConnection),
    ],
)
def test_an_apps_locks_use_tls_where_its_other_connections_to_that_redis_do(
    app_store: Callable[..., RedisStore], conf: dict[str, Any], kind: type
) -> None:
    made = app_store(**conf)._pool
    assert made.connection_class is kind
    if kind is SSLConnection:
        assert verify_mode(made) == ssl.CERT_NONE


# --- what is refused

BROKEN = [
    f"redis://:{SECRET}/1@h/0",
    f"redis://:{SECRET}#1@h/0",
    f"redis://:{SECRET}?1@h/0",
    f"redis://:1/{SECRET}@h/0",
    f"redis://:1#{SECRET}@h/0",
    f"redis://:1?{SECRET}@h/0",
    f"redis://:1?{SECRET}=1@h/0",
    f"redis://:1?db={SECRET}@h/0",
    f"redis://:{SECRET}[@h/0",
    f"redis://:{SECRET}]@h/0",
    f"redis://:{SECRET}\u2100@h/0",  # not allowed in a host: Python's message quotes it
    f"redis://:{SECRET}@h:port/0",
    f"redis://:{SECRET}@h:99999/0",
    f"redis://:{SECRET}@[::1/0",
    f"redis://:{SECRET}@h/zero",
    f"redis://:{SECRET}@h/-1",
    f"redis://:{SECRET}@h/0/1",
    f"redis://:{SECRET}@h/{'1' * 5000}",
    f"redis://:{SECRET}@h/0?db=zero",
    f"redis://:{SECRET}@h/0?{SECRET}",
    f"redis://:{SECRET}@h/0#0",
    f"redis://:{SECRET}@h/0?no_such_keyword=1",
    f"redis://:{SECRET}@h/0?max_connections=many",
    f"redis://:{SECRET}@h/0?credential_provider=app.{SECRET}",
    f"redis+socket://:{SECRET}@/s?virtual_host=zero",
    f"unix://:{SECRET}@?db=1",
    f"unix://:{SECRET}@run/redis.sock",
    f"redis+socket://run/redis.sock?password={SECRET}",
    f"unix://:{SECRET}/1@/run/redis.sock",
]


@pytest.mark.parametrize("setting", ["redislock_url", "result_backend", "broker_url"])
@pytest.mark.parametrize("url", BROKEN)
def test_a_wrong_url_is_a_config_error_that_names_the_setting_and_keeps_the_secret(url: str, setting: str) -> None:
    message = refusal(url, setting=setting)
    assert message.startswith(setting)
    assert SECRET not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("redis://:a#b@h/0", "percent-encode special characters of the password"),
        ("redis://:a/b@h/0", "percent-encode special characters of the password"),
        ("redis://h/zero", "ends in something that is not a database number; write redis://user:password@host:6379/0"),
        ("unix://run/redis.sock", "names no socket; write three slashes, as in unix:///run/redis.sock?db=0"),
        ("unix://?db=1", "names no socket"),
        ("redis://h?max_connections=many", "max_connections in the URL's query has a wrong value"),
        ("redis://h/0?no_such_keyword=1", "redis://h/0: "),
    ],
)
def test_the_error_says_what_is_wrong_with_the_url(url: str, what: str) -> None:
    assert what in refusal(url)


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("sentinel://h:26379/0", "'sentinel'"),
        ("amqp://h", "'amqp'"),
        ("http://h", "'http'"),
        ("REDIS://h", "'REDIS'"),
        (f"{SECRET}:6379", "''"),
        (f":{SECRET}@h://x", "''"),
        ("", "''"),
    ],
)
def test_a_scheme_that_locks_can_not_use_is_refused_with_those_that_they_can(url: str, scheme: str) -> None:
    assert refusal(url, setting="broker_url") == (
        f"broker_url: {scheme} is not a scheme that locks can use; use redis, rediss, unix, redis+socket, memory"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"no_such_keyword": 1},
        {"cluster": True},
        {1: 2},
        {"max_connections": -1},
        {"username": "u", "credential_provider": UsernamePasswordCredentialProvider("u", SECRET)},
    ],
)
def test_options_that_redis_py_does_not_take_are_refused_at_once(options: dict[Any, Any]) -> None:
    message = refusal(f"redis://:{SECRET}@h/0?password={SECRET}", options)
    assert message.startswith("redislock_url or redislock_options: redis://h/0: ")
    assert SECRET not in message


@pytest.mark.parametrize("protocol", ["new", 4, None, True])
def test_a_protocol_is_one_that_redis_speaks(protocol: object) -> None:
    message = "redislock_url or redislock_options: protocol is neither 2 nor 3"
    assert refusal("redis://h", {"protocol": protocol}) == message


def test_protocol_2_is_spoken_unless_3_was_asked_for() -> None:
    assert pool("redis://h").connection_kwargs["protocol"] == 2
    assert pool("redis://h", {"protocol": 3}).connection_kwargs["protocol"] == 3
    assert int(pool("redis://h?protocol=3").connection_kwargs["protocol"]) == 3


def test_a_credential_provider_is_an_object() -> None:
    provider = UsernamePasswordCredentialProvider("u", SECRET)
    assert pool("redis://h", {"credential_provider": provider}).connection_kwargs["credential_provider"] is provider
    assert "credential_provider is not an instance of" in refusal("redis://h", {"credential_provider": "app.Provider"})


# --- fit for logs


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        (f"redis://user:{SECRET}@h:6379/0", "redis://h:6379/0"),
        (f"redis://h:6379/0?password={SECRET}", "redis://h:6379/0"),
        (f"rediss://:{SECRET}@[::1]:6379/0?ssl_password={SECRET}#{SECRET}", "rediss://[::1]:6379/0"),
        (f"unix://:{SECRET}@/run/redis.sock?db=1", "unix:///run/redis.sock"),
        (f"redis://:a@{SECRET}@h/0", "redis://h/0"),
        (f"redis://:a/{SECRET}@h/0", "redis://h/0"),
        (f"redis://:{SECRET}?b@h/0", "redis://..."),
        (f"redis://:{SECRET}#b@h/0", "redis://..."),
        (f"redis://h/0?password=a@{SECRET}", "redis://..."),
        (f"redis://:{SECRET}[@h/0", "redis://h/0"),
        ("memory://", "memory://"),
        (SECRET, "..."),
        ("", "..."),
    ],
)
def test_a_url_for_logs_has_no_user_and_no_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


@given(st.text(alphabet="ab/?#@:[]%&= "), st.text(alphabet="ab/?#@:[]%&= "))
def test_no_password_gets_out_however_badly_it_is_written(before: str, after: str) -> None:
    url = f"redis://{before}:{SECRET}{after}@h/0"
    messages = [without_password(url)]
    try:
        make_store(url, {}, 3.0)
    except LockConfigError as error:
        messages.append(str(error))
    assert SECRET not in "".join(messages)


def test_a_store_is_not_shown_with_its_password(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        store = make_store(f"redis://:{SECRET}@h/0", {"username": SECRET}, 3.0)
    assert SECRET not in repr(store)
    assert SECRET not in caplog.text


def test_the_public_names_exist() -> None:
    assert all(hasattr(connect, name) for name in connect.__all__)
