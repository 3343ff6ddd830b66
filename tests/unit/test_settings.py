"""celery_redislock.settings: what a real app's configuration says, in any namespace."""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_redislock.errors import LockConfigError
from celery_redislock.options import OPTION_NAMES, PER_TASK
from celery_redislock.runtime import Runtime
from celery_redislock.settings import DEFAULT_TIMEOUT, KNOWN, Settings, warn_of_unknown

SECRET = "s3cr3t"
REDIS = "redis://127.0.0.1:6379/0"
OTHER = "redis://127.0.0.2:6379/0"


@pytest.fixture(autouse=True)
def nothing_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def make_app(**conf: Any) -> Celery:
    app = Celery("settings", set_as_current=False)
    app.conf.update({"broker_url": REDIS, **conf})
    return app


def read(**conf: Any) -> Settings:
    return Settings.read(make_app(**conf).conf)


def refusal(**conf: Any) -> str:
    with pytest.raises(LockConfigError) as caught:
        read(**conf)
    assert SECRET not in str(caught.value)
    return str(caught.value)


# --- where the locks live


@pytest.mark.parametrize(
    ("conf", "url", "setting"),
    [
        ({"result_backend": REDIS, "broker_url": OTHER}, REDIS, "result_backend"),
        ({"result_backend": REDIS, "broker_url": "amqp://"}, REDIS, "result_backend"),
        ({"result_backend": "rpc://", "broker_url": OTHER}, OTHER, "broker_url"),
        ({"result_backend": "db+sqlite://", "broker_url": OTHER}, OTHER, "broker_url"),
        ({"broker_url": OTHER}, OTHER, "broker_url"),
        ({"broker_url": "rediss://h/0"}, "rediss://h/0", "broker_url"),
        ({"broker_url": "redis+socket:///s?virtual_host=1"}, "redis+socket:///s?virtual_host=1", "broker_url"),
        ({"redislock_url": "redis://h/9", "result_backend": REDIS}, "redis://h/9", "redislock_url"),
        ({"redislock_url": "redis://h/9", "broker_url": "amqp://"}, "redis://h/9", "redislock_url"),
        ({"redislock_url": "memory://", "broker_url": "amqp://"}, "memory://", "redislock_url"),
        ({"redislock_url": None, "broker_url": OTHER}, OTHER, "broker_url"),
        ({"result_backend": f"{REDIS};{OTHER}", "broker_url": OTHER}, OTHER, "broker_url"),
    ],
)
def test_locks_live_where_it_was_said_else_with_the_results_else_with_the_broker(
    conf: dict[str, Any], url: str, setting: str
) -> None:
    settings = read(**conf)
    assert (settings.url, settings.url_setting) == (url, setting)


@pytest.mark.parametrize(
    "conf",
    [
        {"broker_url": "amqp://"},
        {"broker_url": "amqp://", "result_backend": "rpc://"},
        {"broker_url": "memory://", "result_backend": "cache+memory://"},
        {"broker_url": f"{REDIS};{OTHER}"},
        {"broker_url": [REDIS, OTHER]},
        {"broker_url": (REDIS, OTHER), "result_backend": "rpc://"},
        {"broker_url": "sentinel://h:26379/0;sentinel://i:26379/0"},
        {"broker_url": f"amqp://user:{SECRET}@h//"},
    ],
)
def test_without_one_redis_to_lock_on_the_error_says_what_to_set(conf: dict[str, Any]) -> None:
    message = refusal(**conf)
    assert message.startswith("there is no Redis to lock on")
    assert 'Set redislock_url = "redis://host:6379/0"' in message


def test_several_redis_need_a_redislock_url_and_then_all_is_well() -> None:
    assert "of several, say which" in refusal(broker_url=f"{REDIS};{OTHER}")
    assert read(broker_url=f"{REDIS};{OTHER}", redislock_url=OTHER).url == OTHER


def test_an_app_made_with_arguments_only_is_understood() -> None:
    app = Celery("args", broker="amqp://", backend=REDIS, set_as_current=False)
    assert Settings.read(app.conf).url_setting == "result_backend"


@pytest.mark.parametrize("value", ["", SECRET, f"{SECRET}:6379", 6379, b"redis://h", ["redis://h"], True])
def test_a_url_that_is_none_is_refused_without_showing_it(value: object) -> None:
    assert refusal(redislock_url=value) == "redislock_url is not a URL; write redis://host:6379/0"


# --- user, password, TLS


def test_the_password_is_in_no_repr() -> None:
    settings = read(
        redislock_url=f"redis://user:{SECRET}@h/0",
        redislock_options={"password": SECRET},
        broker_url=f"redis://:{SECRET}@h/0",
    )
    assert SECRET in settings.url
    assert SECRET not in repr(settings)
    assert SECRET not in str(settings)
    settings = read(result_backend=REDIS, redis_password=SECRET, redis_backend_use_ssl={"ssl_password": SECRET})
    assert SECRET in str(settings.client_options["password"])
    assert SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("conf", "options"),
    [
        ({"result_backend": REDIS}, {}),
        ({"result_backend": REDIS, "redis_password": SECRET}, {"password": SECRET}),
        (
            {"result_backend": REDIS, "redis_username": "u", "redis_password": SECRET},
            {"username": "u", "password": SECRET},
        ),
        (
            {"result_backend": REDIS, "redis_password": SECRET, "redislock_options": {"password": "own"}},
            {"password": "own"},
        ),
        ({"broker_url": REDIS, "redis_password": SECRET}, {}),
        ({"redislock_url": REDIS, "redis_password": SECRET}, {}),
    ],
)
def test_the_result_backends_credentials_are_used_where_its_url_is(conf: dict[str, Any], options: object) -> None:
    assert read(**conf).client_options == options


TLS = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "ca.pem"}


@pytest.mark.parametrize(
    ("conf", "use_ssl"),
    [
        ({"result_backend": REDIS, "redis_backend_use_ssl": TLS, "broker_use_ssl": {"ssl_cert_reqs": None}}, TLS),
        ({"broker_url": REDIS, "broker_use_ssl": TLS, "redis_backend_use_ssl": {"ssl_cert_reqs": None}}, TLS),
        ({"redislock_url": REDIS, "broker_use_ssl": TLS, "redis_backend_use_ssl": TLS}, None),
        ({"redislock_url": REDIS, "broker_use_ssl": True}, None),
        ({"broker_url": REDIS, "broker_use_ssl": False}, None),
        ({"broker_url": REDIS, "broker_use_ssl": None}, None),
        ({"broker_url": REDIS}, None),
    ],
)
def test_tls_is_what_celery_uses_for_the_url_that_was_taken(conf: dict[str, Any], use_ssl: object) -> None:
    assert read(**conf).use_ssl == use_ssl


@pytest.mark.parametrize(
    ("setting", "conf"),
    [
        ("broker_use_ssl", {"broker_url": REDIS, "broker_use_ssl": True}),
        ("redis_backend_use_ssl", {"result_backend": REDIS, "redis_backend_use_ssl": True}),
        ("redis_backend_use_ssl", {"result_backend": REDIS, "redis_backend_use_ssl": "required"}),
    ],
)
def test_tls_that_celery_would_silently_leave_out_is_refused(setting: str, conf: dict[str, Any]) -> None:
    assert refusal(**conf).startswith(f'{setting} is not a mapping: for Redis write {{"ssl_cert_reqs": "required"}}')


# --- prefix


@pytest.mark.parametrize(
    ("conf", "prefix"),
    [
        ({}, "redislock"),
        ({"redislock_prefix": "locks"}, "locks"),
        ({"broker_transport_options": {"global_keyprefix": "prod:"}}, "prod:redislock"),
        ({"broker_transport_options": {"global_keyprefix": "prod:"}, "redislock_prefix": "l"}, "prod:l"),
        ({"broker_transport_options": {"global_keyprefix": ""}}, "redislock"),
        ({"broker_transport_options": {"visibility_timeout": 60}}, "redislock"),
        ({"broker_transport_options": None}, "redislock"),
        ({"result_backend_transport_options": {"global_keyprefix": "prod:"}}, "redislock"),
        (
            {
                "result_backend": REDIS,
                "result_backend_transport_options": {"global_keyprefix": "results:"},
                "broker_transport_options": {"global_keyprefix": "broker:"},
            },
            "results:redislock",
        ),
        (
            {"result_backend": REDIS, "broker_transport_options": {"global_keyprefix": "broker:"}},
            "redislock",
        ),
        ({"redislock_url": OTHER, "result_backend_transport_options": {"global_keyprefix": "r:"}}, "r:redislock"),
        ({"redislock_url": OTHER, "broker_transport_options": {"global_keyprefix": "b:"}}, "b:redislock"),
        (
            {
                "redislock_url": OTHER,
                "result_backend_transport_options": {"global_keyprefix": "r:"},
                "broker_transport_options": {"global_keyprefix": "b:"},
            },
            "r:redislock",
        ),
    ],
)
def test_the_transports_key_prefix_comes_before_our_own(conf: dict[str, Any], prefix: str) -> None:
    assert read(**conf).prefix == prefix


@pytest.mark.parametrize("value", ["", "  ", None, 1, b"locks", ["locks"]])
def test_a_prefix_that_would_not_set_keys_apart_is_refused(value: object) -> None:
    assert refusal(redislock_prefix=value) == (
        'redislock_prefix is not a non-empty string; leave it out for "redislock"'
    )


# --- the rest


@pytest.mark.parametrize(("value", "taken"), [({}, {}), ({"username": "u"}, {"username": "u"}), (None, {})])
def test_options_for_the_client_are_handed_on(value: object, taken: object) -> None:
    assert read(redislock_options=value).client_options == taken


@pytest.mark.parametrize("value", ["username=u", 1, True, [], [("username", "u")], ""])
def test_options_that_are_no_mapping_are_refused(value: object) -> None:
    assert refusal(redislock_options=value) == ("redislock_options is not a mapping of keywords for the Redis client")


@pytest.mark.parametrize(("value", "taken"), [(5, 5.0), (0.05, 0.05), (300, 300.0), (1.5, 1.5)])
def test_a_timeout_is_a_number_of_seconds(value: float, taken: float) -> None:
    timeout = read(redislock_timeout=value).timeout
    assert timeout == taken
    assert type(timeout) is float


def test_the_timeout_is_five_seconds_if_nothing_is_said() -> None:
    assert read().timeout == DEFAULT_TIMEOUT == 5.0


@pytest.mark.parametrize("value", [0, 0.04, -1, 301, 10**12, math.nan, math.inf, None, True, "5", [5], "x" * 10_000])
def test_a_timeout_that_would_not_bound_anything_is_refused(value: object) -> None:
    message = refusal(redislock_timeout=value)
    assert message.startswith("redislock_timeout=")
    assert message.endswith(" is not a number of seconds from 0.05 to 300")
    assert len(message) < 160


@pytest.mark.parametrize(
    ("conf", "eager"), [({}, False), ({"redislock_eager": False}, False), ({"redislock_eager": True}, True)]
)
def test_eager_calls_take_a_lock_only_where_it_was_said(conf: dict[str, Any], eager: bool) -> None:
    assert read(**conf).eager is eager


@pytest.mark.parametrize(
    ("value", "shown"), [("yes", "'yes'"), (1, "1"), (0, "0"), (None, "None"), ("x" * 1000, "'" + "x" * 76 + "...")]
)
def test_eager_that_is_no_bool_is_refused_by_its_name(value: object, shown: str) -> None:
    assert refusal(redislock_eager=value) == f"redislock_eager={shown} is not True or False"


def test_options_of_all_tasks_are_taken_as_they_were_written() -> None:
    assert read(redislock_ttl=60, redislock_on_conflict="retry", redislock_skip_result=None).defaults == {
        "ttl": 60,
        "on_conflict": "retry",
        "skip_result": None,
    }
    assert read().defaults == {}


@pytest.mark.parametrize("option", sorted(PER_TASK))
def test_what_belongs_to_a_task_is_refused_as_a_setting(option: str) -> None:
    assert refusal(**{f"redislock_{option}": "x"}) == (
        f"the app's settings: redislock_{option} can't be said for a whole app; say lock_{option} on the task"
    )


def test_every_option_but_those_of_one_task_is_a_known_setting() -> None:
    assert {f"redislock_{name}" for name in OPTION_NAMES if name not in PER_TASK} <= set(KNOWN)
    assert not {f"redislock_{name}" for name in PER_TASK} & set(KNOWN)


# --- namespaces


def namespaced(namespace: str | None, **conf: Any) -> Celery:
    app = Celery("namespaced", set_as_current=False)
    app.config_from_object(SimpleNamespace(**conf), namespace=namespace)
    return app


def test_all_settings_work_under_a_namespace() -> None:
    app = namespaced(
        "CELERY",
        CELERY_BROKER_URL="amqp://",
        CELERY_RESULT_BACKEND=REDIS,
        CELERY_RESULT_BACKEND_TRANSPORT_OPTIONS={"global_keyprefix": "prod:"},
        CELERY_REDIS_BACKEND_USE_SSL=TLS,
        CELERY_REDIS_PASSWORD=SECRET,
        CELERY_REDISLOCK_PREFIX="locks",
        CELERY_REDISLOCK_OPTIONS={"client_name": "c"},
        CELERY_REDISLOCK_TIMEOUT=2,
        CELERY_REDISLOCK_EAGER=True,
        CELERY_REDISLOCK_TTL=60,
        CELERY_REDISLOCK_ON_CONFLICT="wait",
    )
    assert Settings.read(app.conf) == Settings(
        url=REDIS,
        url_setting="result_backend",
        prefix="prod:locks",
        client_options={"password": SECRET, "client_name": "c"},
        use_ssl=TLS,
        timeout=2.0,
        eager=True,
        defaults={"ttl": 60, "on_conflict": "wait"},
    )


def test_the_url_works_under_a_namespace() -> None:
    app = namespaced("CELERY", CELERY_BROKER_URL=OTHER, CELERY_REDISLOCK_URL=REDIS)
    assert Settings.read(app.conf).url == REDIS


def test_errors_come_under_a_namespace_too() -> None:
    app = namespaced("CELERY", CELERY_BROKER_URL=REDIS, CELERY_REDISLOCK_ON=["account_id"])
    with pytest.raises(LockConfigError, match="say lock_on on the task"):
        Settings.read(app.conf)


# --- misspelt settings


def warnings(app: Celery, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="celery_redislock"):
        warn_of_unknown(app.conf, app.conf.prefix)
    assert {record.name for record in caplog.records} <= {"celery_redislock.settings"}
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("redislock_tll", "did you mean redislock_ttl?"),
        ("redislock_uri", "did you mean redislock_url?"),
        ("redislock_key_prefix", "did you mean redislock_prefix?"),
        ("redislock_onconflict", "did you mean redislock_on_conflict?"),
        ("redislock_expiry", "did you mean redislock_ttl?"),
        ("redislock_xyzzyplugh", "known: redislock_done_ttl, redislock_eager, "),
        ("redislock_", "known: "),
    ],
)
def test_a_misspelt_setting_is_warned_about_with_the_nearest_name(
    name: str, hint: str, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = warnings(make_app(**{name: 1}), caplog)
    assert text.startswith(f"the app's settings: unknown option {name}; {hint}")


def test_the_value_of_a_misspelt_setting_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings(make_app(redislock_uri=f"redis://:{SECRET}@h"), caplog)
    assert SECRET not in text


def test_right_names_and_names_of_others_are_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(make_app(**dict.fromkeys(KNOWN), redbeat_lock_timeout=5, redis_max_connections=3), caplog) == []
    right = {f"CELERY_{name.upper()}": None for name in KNOWN}
    assert warnings(namespaced("CELERY", **right), caplog) == []
    assert warnings(namespaced("CELERY", **dict.fromkeys(KNOWN)), caplog) == []
    assert warnings(namespaced("celery", **{f"celery_{name}": None for name in KNOWN}), caplog) == []


def test_a_setting_in_a_case_that_celery_does_not_read_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(REDISLOCK_TTL=60)
    assert Settings.read(app.conf).defaults == {}
    assert warnings(app, caplog) == [
        "the app's settings: REDISLOCK_TTL is not read; Celery looks for redislock_ttl",
    ]


def test_a_setting_without_the_namespace_is_warned_about_if_it_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    app = namespaced("CELERY", CELERY_BROKER_URL=REDIS, REDISLOCK_TTL=60, redislock_wait=3, CELERY_REDISLOCK_TLL=1)
    assert Settings.read(app.conf).defaults == {"wait": 3}
    assert sorted(warnings(app, caplog)) == [
        "the app's settings: REDISLOCK_TTL is not read; Celery looks for CELERY_REDISLOCK_TTL",
        "the app's settings: unknown option redislock_tll; did you mean redislock_ttl?",
    ]


# --- all of it together


@pytest.fixture
def forgotten() -> Iterator[list[Celery]]:
    apps: list[Celery] = []
    yield apps
    for app in apps:
        Runtime.forget(app)


def test_bad_options_of_all_tasks_stop_the_app_and_name_the_setting(forgotten: list[Celery]) -> None:
    forgotten.append(make_app(redislock_ttl=10**12))
    with pytest.raises(LockConfigError, match=r"^the app's settings: redislock_ttl=1000000000000 is more than"):
        Runtime.of(forgotten[0])


def test_a_misspelt_setting_is_warned_about_when_the_app_is_used(
    forgotten: list[Celery], caplog: pytest.LogCaptureFixture
) -> None:
    forgotten.append(make_app(redislock_tll=1))
    Runtime.of(forgotten[0])
    assert "did you mean redislock_ttl?" in caplog.text
