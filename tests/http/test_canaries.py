"""Every secret that passes through the gateway, each marked, and every place that must not show it.

What a secret is: tokens of callers, what the gateway shows to engines and to their issuers, keys of
certificates, the database's password, whatever stands before the `@` of an address, and what is in
the bodies of weights.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import SecretStr
from sqlalchemy import make_url

from app.domain.scopes import Scope
from app.http.records import record_refused_callers
from app.main import serve
from app.observability.log import configure_logging
from app.settings import IssuerSettings, Settings, SettingsError, load_settings
from tests.auth.conftest import Origin
from tests.auth.conftest import origin as origin
from tests.cli.conftest import Run
from tests.cli.conftest import built as built
from tests.cli.conftest import run as run
from tests.http.full import FULL, full_engine
from tests.http.gateway import Gateway, gateway

pytestmark = pytest.mark.anyio

KINDS = (
    *("token", "bearer", "secret", "tlskey", "password", "userinfo", "weights", "idempotency"),
    *("proof", "answer", "asking"),
)


def canary(kind: str) -> str:
    assert kind in KINDS
    return f"canary0{kind}0yranac"


def check_clean(told: dict[str, str], *but: str) -> None:
    """No mark in any of it, plain or in base64, wherever in it a group of three may begin."""
    for place, text in told.items():
        for kind in KINDS:
            if kind in but:
                continue
            marks = [canary(kind)]
            for shift in range(3):
                spelled = base64.b64encode(b"x" * shift + canary(kind).encode()).decode()
                marks.append(spelled[4:-4])
            found = [mark for mark in marks if mark.lower() in text.lower()]
            assert not found, f"{kind} in {place}"


def test_the_check_finds_what_it_is_for() -> None:
    for text in (
        f"x {canary('token').upper()} y",
        base64.b64encode(f"ab{canary('token')}cd".encode()).decode(),
    ):
        with pytest.raises(AssertionError, match="token in here"):
            check_clean({"here": text})


@pytest.mark.parametrize("style", ["json", pytest.param("console", marks=pytest.mark.long)])
async def test_a_running_gateway_shows_no_secret(
    style: Literal["json", "console"],
    logged: io.StringIO,
    tmp_path: Path,
    postgres_url: str,
    capfd: pytest.CaptureFixture[str],
    origin: Origin,
) -> None:
    configure_logging("debug", style, logged)
    files = {}
    for name, text in (
        ("bearer", canary("bearer")),
        ("secret", canary("secret")),
        ("asking", canary("asking")),
        ("tlskey", f"-----BEGIN PRIVATE KEY-----\n{canary('tlskey')}\n"),
    ):
        files[name] = tmp_path / name
        files[name].write_text(text)
    oauth = {
        "token_url": "http://127.0.0.1:1/token",
        "client_id": "gateway",
        "client_secret_file": files["secret"],
    }
    tls = {"certificate": files["tlskey"], "key": files["tlskey"]}
    settings: dict[str, Any] = {
        "database_url": make_url(postgres_url)
        .set(password=canary("password"))
        .render_as_string(hide_password=False),
        "engine_credentials": {
            "file": {"bearer_file": files["bearer"]},
            "oauth": {"oauth": oauth},
            "tls": {"tls": tls},
        },
        "max_refusals_per_minute": 5,
        "trust": {
            "dpop": "allowed",
            "introspection": {
                "client_id": "gateway",
                "client_secret_file": files["asking"],
                "endpoint": f"{origin.url}/introspect",
            },
        },
    }
    told: dict[str, str] = {}
    # From the start: one that can't be asked is left alone for a while.
    origin.say("/introspect", json.dumps({"active": False, "x": canary("answer")}).encode())
    async with (
        gateway(tmp_path / "data", **settings) as gate,
        full_engine(gate, tmp_path / "full"),
    ):
        token = gate.token(*Scope)

        async def ask(name: str, method: str, path: str, **what: Any) -> None:
            what["headers"] = {"Authorization": f"Bearer {token}", **what.get("headers", {})}
            answer = await gate.http.request(method, path, **what)
            told[name] = f"{answer.status_code} {answer.headers} {answer.text}"

        for name in ("file", "oauth", "tls"):
            body: dict[str, Any] = {"id": name, "members": member(gate)}
            body |= {"tls": {"credential": name}, "allow_shared_address": True}
            await ask(f"register {name}", "POST", "/v1/engines", json=body)
            await ask(f"models of {name}", "GET", f"/v1/engines/{name}/models")
            await ask(
                f"flush {name}",
                "POST",
                f"/v1/engines/{name}/flush-caches",
                json={"caches": ["prefix"]},
                headers={"Idempotency-Key": f"{canary('idempotency')}-{name}", "Prefer": "wait=5"},
            )
        there = f"{canary('userinfo')}:pw@127.0.0.1:7"
        body = {"id": "user", "members": [{"rank": 0, "admin": there, "control": there}]}
        await ask("register with user info", "POST", "/v1/engines", json=body)

        data = base64.b64encode((canary("weights") * 5)[:96].encode()).decode()
        tensor = {"name": "w", "dtype": "float32", "shape": [24], "data": data}
        update: dict[str, Any] = {
            "source": {"tensors": {"inline": {"tensors": [tensor]}}},
            "weight_version": "v2",
            "pause": "drain",
        }
        path = f"/v1/engines/{FULL}/update-weights"
        wrong = [{name: data} for name in ("when", "cache_policy", "pause")]
        changes: list[dict[str, Any]] = [{"dry_run": True}, {}, {}, *wrong]
        for number, changed in enumerate(changes):
            headers = {**gate.key(), "Prefer": "wait=20"}
            sent: dict[str, Any] = {"json": {**update, **changed}, "headers": headers}
            await ask(f"update {number}", "POST", path, **sent)
        await ask("update broken", "POST", path, content=f'{{"x": "{data}"'.encode())

        proof = {"DPoP": f"{canary('proof')}.{canary('proof')}.{canary('proof')}"}
        for number, scheme in enumerate(("Bearer", "DPoP")):
            headers = {"Authorization": f"{scheme} {canary('token')}-opaque{number}", **proof}
            await ask(f"opaque {scheme}", "GET", "/v1/me", headers=headers)
        headers = {"Authorization": f"DPoP {token}", **proof}
        await ask("proof", "GET", "/v1/me", headers=headers)
        asked = [form["token"] for _, form in origin.posted]
        assert f"{canary('token')}-opaque0" in asked

        for number, bad in enumerate((canary("token"), f"{canary('token')}.a.b", f"{token}x") * 3):
            headers = {"Authorization": f"Bearer {bad}"}
            await ask(f"bad token {number}", "GET", "/v1/engines", headers=headers)
        await ask("token in the query", "GET", f"/v1/engines?access_token={canary('token')}")
        headers = {
            "Cookie": f"s={canary('token')}",
            "X-Api-Key": canary("token"),
            "Proxy-Authorization": f"Basic {canary('token')}",
            "User-Agent": canary("token"),
            "Referer": f"https://a:{canary('userinfo')}@b.test",
            "DPoP": canary("proof"),
        }
        await ask("token elsewhere", "GET", f"/v1/{canary('token')}", headers=headers)

        rooms = gate.rooms
        await record_refused_callers(
            rooms.ledger, rooms.refused_callers, rooms.clock, all_of_them=True
        )
        as_stream = {"Accept": "text/event-stream"}
        for path in ("/v1/engines", "/v1/events?after=0", "/v1/audit?page_size=200", "/v1/me"):
            await ask(path, "GET", path, headers={"Accept": "application/json"})
        for path in ("/metrics", "/openapi.json", "/readyz", "/problems"):
            await ask(path, "GET", path)
        await ask("audit table", "GET", "/v1/audit", headers={"Accept": "text/csv"})
        page = await gate.get("/v1/operations?page_size=200")
        operations = page.json()["items"]
        told["operations"] = page.text
        for operation in operations:
            events = f"/v1/operations/{operation['id']}/events"
            if operation["done"]:
                await ask(f"stream of {operation['kind']}", "GET", events, headers=as_stream)
        assert told["update 1"].startswith("200 "), told["update 1"]
        kinds = {operation["kind"] for operation in operations}
        assert kinds == {"flush_caches", "update_weights"}
        assert any(place.startswith("stream of update") for place in told)
    told["logs"] = logged.getvalue()
    told["standard output"], told["standard error"] = capfd.readouterr()
    assert "request" in told["logs"]
    for place, text in told.items():
        # An idempotency key is no secret and stands in its operation; no more than that.
        shows_key = place == "operations" or place.startswith(("flush", "stream", "/v1/events"))
        check_clean({place: text}, *(("idempotency",) if shows_key else ()))
        assert token not in text, place
        assert token.rpartition(".")[2] not in text, place


def member(gate: Gateway) -> list[dict[str, Any]]:
    return [{"rank": 0, "admin": gate.engine.address, "control": gate.engine.address}]


BAD_DATABASES = (
    "postgresql://ada:{}@127.0.0.1:1/none?connect_timeout=2",
    "postgresql://ada@127.0.0.1:1/none?{}=1",
    "{}",
    *(
        pytest.param(url, marks=pytest.mark.long)
        for url in (
            "postgresql://ada:1/{}@127.0.0.1:1/none?connect_timeout=2",
            "postgresql://ada:1?{}@127.0.0.1:1/none?connect_timeout=2",
            "postgresql://ada:1#{}@127.0.0.1:1/none",
            "postgresql://ada@127.0.0.1:1/none?password={}&connect_timeout=2",
            "mysql://ada:{}@127.0.0.1/none",
            "postgresql://ada:{}@127.0.0.1:port/none",
        )
    ),
)


@pytest.mark.parametrize("url", BAD_DATABASES)
def test_a_database_that_is_not_there_is_told_without_its_password(
    url: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], logged: io.StringIO
) -> None:
    database = url.format(canary("password"))
    config = tmp_path / "gateway.toml"
    config.write_text(f'database_url = "{database}"\n')
    told = {}
    for verb in (("db", "check"), ("db", "upgrade"), ("db", "prune"), ("audit", "verify")):
        ran = run(*verb, "--config", str(config))
        assert ran.code in (6, 7), ran
        told[" ".join(verb)] = ran.out + ran.err
    issuer = IssuerSettings(issuer="https://issuer.test", jwks_uri="https://issuer.test/keys")
    settings = Settings(
        data_dir=tmp_path / "data",
        database_url=SecretStr(database),
        issuers=(issuer,),
        audience="x",
        port=0,
    )
    assert serve(settings) != 0
    told["settings"] = f"{settings!r} {settings}"
    told["standard output"], told["standard error"] = capsys.readouterr()
    told["logs"] = logged.getvalue()
    check_clean(told)


@pytest.mark.parametrize(
    "changes",
    [
        {"issuers": ({"issuer": "https://ada:{}@issuer.test"},), "audience": "x"},
        {"issuers": ({"issuer": "https://ada:{}@issuer.test"},)},
        {
            "issuers": ({"issuer": "https://i.test", "jwks_uri": "https://a:{}@i.test/k"},),
            "audience": "x",
        },
        {
            "issuers": ({"issuer": "https://i.test"},),
            "audience": "x",
            "engine_credentials": {
                "main": {
                    "oauth": {
                        "token_url": "https://ada:{}@issuer.test/token",
                        "client_id": "gateway",
                        "client_secret_file": "/nowhere",
                    }
                }
            },
        },
        {"public_url": "https://ada:{}@gateway.test"},
        {"max_waiting": "{}"},
        {"unknown": "{}"},
    ],
)
def test_settings_that_are_refused_are_told_without_user_info(
    changes: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    logged: io.StringIO,
) -> None:
    del logged  # the process's own logging comes back afterwards
    said = ""
    try:
        settings = load_settings(data_dir=tmp_path / "data", port=0, **filled(changes))
        assert serve(settings) == 2
    except SettingsError as error:
        said = str(error)
    out, err = capfd.readouterr()
    assert said or err
    check_clean({"the line": said, "standard output": out, "standard error": err})


def filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: filled(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map(filled, value))
    return value.replace("{}", canary("userinfo")) if isinstance(value, str) else value


def test_the_command_takes_no_user_info_and_repeats_none(run: Run) -> None:
    token = canary("token")
    for url in (
        f"http://ada:{canary('userinfo')}@127.0.0.1:1",
        f"http://{canary('userinfo')}@127.0.0.1:1/",
        "http://127.0.0.1:1",
        f"{canary('userinfo')}@x",
    ):
        ran = run("engines", "list", "--url", url, "--token", token)
        assert ran.code in (2, 7)
        check_clean({"standard output": ran.out, "standard error": ran.err})
