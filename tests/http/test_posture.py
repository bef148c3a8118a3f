"""What the gateway says about what it is open to."""

from __future__ import annotations

import base64
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.domain.engine import Dialect, Member, Registration, TlsNames
from app.domain.scopes import Scope
from app.main import posture_at
from app.posture import posture_of
from app.settings import Settings
from tests.cli.conftest import Run
from tests.cli.conftest import built as built
from tests.cli.conftest import run as run
from tests.http.gateway import gateway
from tests.http.test_access import LOGIN, NEEDS, PUBLIC

pytestmark = pytest.mark.anyio

SOUND: dict[str, Any] = {
    "issuers": ({"issuer": "https://issuer.test"},),
    "audience": "urn:test",
}
ISSUER = '[[issuers]]\nissuer = "https://i.test"'
AT = datetime(2026, 11, 30, tzinfo=UTC)


def codes(**changes: Any) -> list[tuple[str, str]]:
    found = posture_of(Settings(**{**SOUND, **changes}), ())
    return [(remark.code, remark.about) for remark in found.warnings]


def test_what_is_set_with_care_is_not_remarked_on() -> None:
    assert codes() == []
    secured = {
        "host": "0.0.0.0",
        "public_url": "https://gateway.test",
        "trusted_proxies": ("10.0.0.0/8",),
        "metrics_port": 9100,
        "database_url": "postgresql://ledger.test/chadburn?sslmode=verify-full",
        "engine_reach": {"hosts": ("*.engines.test",), "cidrs": ("10.1.0.0/16",)},
        "engine_credentials": {
            "main": {"bearer_file": "/t", "tls": {}, "bound_to": ("*.engines.test",)}
        },
    }
    assert codes(**secured) == []


@pytest.mark.parametrize(
    ("changes", "code", "about"),
    [
        (
            {"issuers": ({"issuer": "http://127.0.0.1:9"},)},
            "ISSUER_IN_PLAINTEXT",
            "issuers http://127.0.0.1:9",
        ),
        (
            {"issuers": ({"issuer": "https://u:s3cret@i.test", "profile": "compatible"},)},
            "COMPATIBLE_PROFILE",
            "issuers https://i.test",
        ),
        (
            {
                "issuers": (
                    {
                        "issuer": "https://i.test",
                        "role_use": "add",
                        "role_maps": ({"claim": "roles", "scopes": {"ops": ("admin:read",)}},),
                    },
                )
            },
            "ROLES_ADD_SCOPES",
            "issuers https://i.test",
        ),
        ({"host": "10.0.0.1"}, "PLAINTEXT_BEYOND_LOOPBACK", "host"),
        (
            {"host": "10.0.0.1", "public_url": "https://gateway.test"},
            "PROXY_NOT_NAMED",
            "trusted_proxies",
        ),
        ({"public_url": "http://gateway.test"}, "PLAINTEXT_BEYOND_LOOPBACK", "public_url"),
        ({"public_url": "https://gateway.test"}, "PROXY_NOT_NAMED", "trusted_proxies"),
        ({"trusted_proxies": ("128.0.0.0/1",)}, "ANYBODY_IS_A_PROXY", "trusted_proxies"),
        ({"trusted_proxies": ("0.0.0.0/0",)}, "ANYBODY_IS_A_PROXY", "trusted_proxies"),
        (
            {"metrics_port": 1, "metrics_host": "10.0.0.1"},
            "METRICS_BEYOND_LOOPBACK",
            "metrics_host",
        ),
        ({"clients_may_settle": True}, "PROGRAMS_MAY_SETTLE", "clients_may_settle"),
        (
            {
                "issuers": ({"issuer": "https://i.test", "login": {"client_id": "c"}},),
                "browser_sessions": {"longest_s": 90_000},
            },
            "SESSIONS_LAST_LONG",
            "browser_sessions",
        ),
        ({"max_changes_per_s": 0}, "NO_RATE", "max_changes_per_s"),
        ({"log_level": "debug"}, "DEBUG_LOG", "log_level"),
        (
            {"engine_reach": {"cidrs": ("10.0.0.0/8",)}},
            "WIDE_REACH",
            "engine_reach",
        ),
        ({"engine_reach": {"hosts": ("e.test",)}}, "NAMES_ALONE", "engine_reach"),
        (
            {"engine_reach": {"allow_plaintext_beyond_loopback": True}},
            "ENGINES_IN_PLAINTEXT",
            "engine_reach",
        ),
        (
            {"engine_credentials": {"c": {"bearer_file": "/t", "tls": {}}}},
            "CREDENTIAL_NOT_BOUND",
            "engine_credentials c",
        ),
        (
            {"engine_credentials": {"c": {"bearer_file": "/t", "bound_to": ("e.test",)}}},
            "CREDENTIAL_WITHOUT_TLS",
            "engine_credentials c",
        ),
        (
            {"database_url": "postgresql://u:s3cret@db.test/x?sslmode=require"},
            "DATABASE_NOT_VERIFIED",
            "database_url",
        ),
    ],
)
def test_what_may_not_be_meant_is_remarked_on(
    changes: dict[str, Any], code: str, about: str
) -> None:
    assert codes(**changes) == [(code, about)]


IDENTITY = {"name": "rl", "scopes": ("admin:pause",), "engines": {"labels": {"team": "rl"}}}
TLS = {
    "listen": "10.0.0.1:8443",
    "names": ("trainer.test",),
    "certificate": "/c",
    "key": "/k",
    "client_ca": "/a",
}


def test_callers_that_send_no_token_are_told() -> None:
    by_path = {"secret_file": "/s"}
    for changes, expected in (
        ({"unix_socket": "/run/rl.sock"}, []),
        ({"tls": TLS}, []),
        (by_path, ["SECRET_IN_PATH"]),
        ({**by_path, "engines": "all"}, ["SECRET_IN_PATH", "IDENTITY_ON_ALL_ENGINES"]),
        ({"tls": TLS, "scopes": ("admin:weights.unsafe",)}, ["IDENTITY_UNSAFE"]),
    ):
        found = codes(compat_identity=({**IDENTITY, **changes},))
        assert found == [(code, "compat_identity rl") for code in expected]
    behind = {"public_url": "https://gateway.test", "trusted_proxies": ("10.0.0.2",)}
    assert [code for code, _ in codes(compat_identity=({**IDENTITY, **by_path},), **behind)] == [
        *("SECRET_IN_PATH", "SECRET_PATH_BEHIND_PROXY")
    ]


def test_engines_that_unpickle_are_told() -> None:
    named = {"engines": ("a",)}, {"labels": {"pool": "rl"}}
    assert codes(engine_payloads=named) == [
        ("ENGINE_PAYLOADS_ON", 'engine_payloads {"engines": ["a"]}'),
        ("ENGINE_PAYLOADS_ON", 'engine_payloads {"labels": {"pool": ["rl"]}}'),
    ]


def test_their_listeners_are_told(run: Run, tmp_path: Path) -> None:
    config, secret = tmp_path / "gateway.toml", tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    config.write_text(
        f'data_dir = "{tmp_path / "data"}"\naudience = "urn:test"\n{ISSUER}\n'
        '[[compat_identity]]\nname = "rl"\nscopes = ["admin:read", "admin:pause"]\n'
        f'unix_socket = "{tmp_path}/rl.sock"\nengines = {{ labels = {{ team = "rl" }} }}\n'
        f'[[compat_identity]]\nname = "old"\nscopes = ["admin:read"]\nengines = {{ id = "e1" }}\n'
        f'secret_file = "{secret}"\n'
    )
    ran = run("posture", "--config", str(config))
    assert ran.code == 0, ran.err
    assert f"  compat_identity rl {tmp_path}/rl.sock: loopback, plaintext, tokens\n" in ran.out
    assert (
        f"  rl: unix_socket, {tmp_path}/rl.sock, admin:pause admin:read, engines "
        '{"labels": {"team": "rl"}}\n'
    ) in ran.out
    assert "  old: secret_path, " in ran.out
    assert "SECRET_IN_PATH (compat_identity old): " in ran.out
    assert secret.read_text() not in ran.out


def test_engines_are_told_by_how_they_are_reached() -> None:
    def engine(name: str, address: str, **tls: str) -> Registration:
        return Registration(
            id=name,
            dialect=Dialect.OPENENGINE,
            members=(Member(0, address, address),),
            tls=TlsNames(**tls),
            created_at=AT,
            updated_at=AT,
        )

    settings = Settings(
        **{**SOUND, "engine_credentials": {"c": {"tls": {}, "bound_to": ("10.0.0.3",)}}}
    )
    found = posture_of(
        settings,
        (),
        (
            engine("here", "[::1]:7000"),
            engine("socket", "unix:/run/e.sock"),
            engine("open", "10.0.0.1:7000"),
            engine("named", "10.0.0.2:7000", server_name="e.test"),
            engine("good", "10.0.0.3:7000", credential="c"),
        ),
    )
    assert found.engines is not None
    assert [link.engine for link in found.engines if link.encrypted] == ["named", "good"]
    assert [link.engine for link in found.engines if link.loopback] == ["here", "socket"]
    assert [(one.code, one.about) for one in found.warnings] == [
        ("ENGINE_WITHOUT_TLS", "engine open"),
        ("ENGINE_WITHOUT_CREDENTIAL", "engine open"),
        ("ENGINE_WITHOUT_CREDENTIAL", "engine named"),
    ]


def test_the_table_of_routes_is_the_application_s() -> None:
    routes = posture_at(Settings(**SOUND)).routes
    assert {route.path for route in routes if route.scopes is None} == PUBLIC | LOGIN
    needs = {
        (route.method, route.path): " ".join(route.scopes)
        for route in routes
        if route.scopes is not None
    }
    assert needs == NEEDS
    assert "/metrics" not in PUBLIC
    settle = next(route for route in routes if route.path.endswith("/settle"))
    assert (settle.scopes, settle.person) == ((Scope.SETTLE.value,), True)
    of_kind = {(route.method, route.path) for route in routes if route.of_kind}
    operation = "/v1/operations/{operation}"
    assert of_kind == {("POST", f"{operation}/cancel"), ("POST", f"{operation}/settle")}


def test_the_command_says_it_with_or_without_a_ledger(run: Run, tmp_path: Path) -> None:
    config, key = tmp_path / "gateway.toml", tmp_path / "key"
    key.write_text(base64.b64encode(b"k" * 32).decode())
    config.write_text(
        f'data_dir = "{tmp_path / "data"}"\naudience = "urn:test"\nclients_may_settle = true\n'
        f'browser_sessions = {{ key_files = ["{key}"] }}\n'
        '[[issuers]]\nissuer = "https://issuer.test"\ndpop = "allowed"\n'
        'login = { client_id = "dashboard" }\n'
        f'[issuers.introspection]\nclient_id = "c"\nclient_secret_file = "{config}"\n'
    )
    ran = run("posture", "--config", str(config))
    assert ran.code == 0, ran.err
    assert "  http 127.0.0.1:8765: loopback, plaintext, tokens\n" in ran.out
    assert "  https://issuer.test: urn:test, strict, RS256 ES256, asked about tokens: " in ran.out
    assert "tokens: opaque, DPoP allowed, logins with a browser\n" in ran.out
    assert "  the register could not be read\n" in ran.out
    assert "  GET /metrics: admin:read\n" in ran.out
    assert "  GET /healthz\n" in ran.out
    cancel = "POST /v1/operations/{operation}/cancel: admin:cancel"
    assert f"  {cancel} and the scope of the operation's kind\n" in ran.out
    assert "  PROGRAMS_MAY_SETTLE (clients_may_settle): " in ran.out
    assert not (tmp_path / "data").exists()
    run("db", "upgrade", "--config", str(config))
    assert run("posture", "--config", str(config), "--strict").code == 3
    found = json.loads(run("posture", "--config", str(config), "--json").out)
    assert found["engines"] == []
    assert [one["code"] for one in found["warnings"]] == ["PROGRAMS_MAY_SETTLE"]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "no token issuer is configured"),
        (['[[issuers]]\nissuer = "https://i.test"'], "no audience is set"),
        (['audience = "a"', '[[issuers]]\nissuer = "i.test"'], "issuer"),
        (['audience = "a"', '[engine_reach]\ncidrs = ["10.0.0.0/99"]', ISSUER], "engine_reach"),
        (['audience = "a"', 'policy_file = "/nowhere"', ISSUER], "policy_file /nowhere"),
        (
            [
                'audience = "a"',
                f"{ISSUER}\n[issuers.introspection]\nclient_id = 'g'"
                "\nclient_secret_file = '/nowhere'",
            ],
            "client_secret_file: cannot be read",
        ),
    ],
)
def test_settings_with_which_nothing_starts_are_told_as_that(
    run: Run, tmp_path: Path, lines: list[str], why: str
) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("\n".join([f'data_dir = "{tmp_path / "data"}"', *lines]))
    ran = run("posture", "--config", str(config), "--json")
    assert ran.code == 2
    assert ran.err.startswith("chadburn: the gateway does not start: ")
    assert why in ran.err
    found = json.loads(ran.out)
    assert found["warnings"][0]["code"] == "DOES_NOT_START"
    assert found["routes"]


def test_what_are_no_settings_has_no_posture(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("prot = 1")
    ran = run("posture", "--config", str(config))
    assert (ran.code, ran.out) == (2, "")
    assert "prot" in ran.err


async def test_warnings_are_told_at_the_start(logged: io.StringIO, tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", clients_may_settle=True):
        lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    told = {line["code"] for line in lines if line["event"] == "posture"}
    assert told == {"PROGRAMS_MAY_SETTLE", "ISSUER_IN_PLAINTEXT", "NO_RATE"}
