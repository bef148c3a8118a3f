"""The development issuer: what it gives to whom, and what it refuses to be."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.auth.principal import AudienceKind, PrincipalKind
from app.auth.tokens.errors import TokenInvalid
from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.verifier import TokenVerifier
from app.devidp.issuer import KEY_FILE, DevIssuer, KeyFileUnsafe
from app.devidp.running import DevIssuerSettings, NotLoopback, running
from app.domain.scopes import Scope

pytestmark = pytest.mark.anyio

SECRET = "a secret of this run"
ADMIN, INFERENCE, ENGINE = "urn:test:admin", "urn:test:inference", "urn:test:engine"


def settings(**changes: Any) -> DevIssuerSettings:
    values: dict[str, Any] = {
        "secret": SECRET,
        "admin_audience": ADMIN,
        "inference_audience": INFERENCE,
        "engine_audience": ENGINE,
        **changes,
    }
    return DevIssuerSettings(**values)


@pytest.fixture(scope="module")
async def issuer() -> AsyncIterator[DevIssuer]:
    async with running(settings()) as issuer:
        yield issuer


@pytest.fixture
async def http(issuer: DevIssuer) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=issuer.issuer, verify=False, trust_env=False) as client:
        yield client


async def ask(http: httpx2.AsyncClient, client_id: str, **form: str) -> httpx2.Response:
    data = {"grant_type": "client_credentials", **form}
    return await http.post("/token", data=data, auth=(client_id, SECRET))


def verifier(http: httpx2.AsyncClient, issuer: DevIssuer, audience: str = ADMIN) -> TokenVerifier:
    others = tuple({ADMIN, INFERENCE} - {audience})
    config = IssuerConfig(issuer=issuer.issuer, audience=audience, inference_audiences=others)
    return TokenVerifier([config], http=http, now=lambda: datetime.now(UTC))


async def test_gives_each_client_what_it_may_have(
    http: httpx2.AsyncClient, issuer: DevIssuer
) -> None:
    judge = verifier(http, issuer)
    for client_id, scopes, audience in [
        ("operator", set(Scope) - {Scope.WEIGHTS_UNSAFE}, AudienceKind.ADMIN),
        ("reader", {Scope.READ}, AudienceKind.ADMIN),
        ("inference", set(), AudienceKind.INFERENCE),
    ]:
        answer = await ask(http, client_id)
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "no-store"
        body = answer.json()
        assert (body["token_type"], body["expires_in"]) == ("Bearer", 3600)
        who = await judge.verify(body["access_token"])
        assert (who.subject, who.client_id, who.kind) == (
            client_id,
            client_id,
            PrincipalKind.CLIENT,
        )
        assert who.scopes == scopes
        assert who.audience is audience
    engine = (await ask(http, "engine")).json()["access_token"]
    with pytest.raises(TokenInvalid):
        await judge.verify(engine)
    assert (await verifier(http, issuer, ENGINE).verify(engine)).may_administer


async def test_narrows_to_the_scope_asked_for(http: httpx2.AsyncClient, issuer: DevIssuer) -> None:
    body = (await ask(http, "operator", scope="admin:pause admin:read")).json()
    assert body["scope"] == "admin:pause admin:read"
    who = await verifier(http, issuer).verify(body["access_token"])
    assert who.scopes == {Scope.PAUSE, Scope.READ}


@pytest.mark.parametrize(
    ("client_id", "form", "error"),
    [
        ("reader", {"scope": "admin:read admin:pause"}, "invalid_scope"),
        ("reader", {"scope": "*"}, "invalid_scope"),
        ("operator", {"scope": "admin:weights.unsafe"}, "invalid_scope"),
        ("operator", {"scope": "admin:read  admin:pause"}, "invalid_scope"),
        ("inference", {"scope": "admin:read"}, "invalid_scope"),
        ("inference", {"resource": ADMIN}, "invalid_target"),
        ("operator", {"resource": ENGINE}, "invalid_target"),
        ("operator", {"audience": "urn:else"}, "invalid_target"),
        ("operator", {"grant_type": "password"}, "unsupported_grant_type"),
        ("operator", {"client_secret": SECRET}, "invalid_request"),
    ],
)
async def test_refuses_more_than_the_client_may_have(
    http: httpx2.AsyncClient, client_id: str, form: dict[str, str], error: str
) -> None:
    answer = await ask(http, client_id, **form)
    assert answer.status_code == 400
    assert answer.json()["error"] == error
    assert answer.headers["cache-control"] == "no-store"


async def test_takes_the_right_resource_and_credentials_in_the_form(
    http: httpx2.AsyncClient,
) -> None:
    assert (await ask(http, "operator", resource=ADMIN, audience=ADMIN)).status_code == 200
    form = {
        "grant_type": "client_credentials",
        "client_id": "reader",
        "client_secret": SECRET,
        "scope": "",
    }
    assert (await http.post("/token", data=form)).json()["scope"] == "admin:read"


@pytest.mark.parametrize("path", ["/token", "/rotate"])
@pytest.mark.parametrize(
    "auth",
    [None, ("operator", "wrong"), ("operator", ""), ("nobody", SECRET), ("", SECRET)],
)
async def test_needs_the_secret(http: httpx2.AsyncClient, path: str, auth: Any) -> None:
    form = {"grant_type": "client_credentials"}
    answer = await http.post(path, data=form, **({"auth": auth} if auth else {}))
    assert answer.status_code == 401
    assert answer.json()["error"] == "invalid_client"
    assert answer.headers["www-authenticate"].startswith("Basic")


@pytest.mark.parametrize("value", ["Bearer x", "Basic", "Basic !!!", "Basic /w=="])
async def test_unreadable_credentials(http: httpx2.AsyncClient, value: str) -> None:
    form = {"grant_type": "client_credentials"}
    answer = await http.post("/token", data=form, headers={"authorization": value})
    assert answer.status_code == 401


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b"{}", "application/json", 400),
        (b"grant_type", "application/x-www-form-urlencoded", 400),
        (b"grant_type=a&grant_type=b", "application/x-www-form-urlencoded", 400),
        (b"\xff=1", "application/x-www-form-urlencoded", 400),
        (b"a=" + b"x" * 20_000, "application/x-www-form-urlencoded", 413),
    ],
)
async def test_unreadable_forms(
    http: httpx2.AsyncClient, content: bytes, content_type: str, status: int
) -> None:
    answer = await http.post(
        "/token",
        content=content,
        headers={"content-type": content_type},
        auth=("operator", SECRET),
    )
    assert (answer.status_code, answer.json()["error"]) == (status, "invalid_request")


async def test_a_new_key_signs_from_then_on(http: httpx2.AsyncClient, issuer: DevIssuer) -> None:
    judge = verifier(http, issuer)
    before = (await ask(http, "reader")).json()["access_token"]
    await judge.verify(before)
    kid = (await http.post("/rotate", data={"a": "b"}, auth=("operator", SECRET))).json()["kid"]
    keys = (await http.get("/jwks")).json()["keys"]
    assert [key["kid"] for key in keys].index(kid) == 0
    assert all("d" not in key for key in keys)
    await judge.verify((await ask(http, "reader")).json()["access_token"])
    await judge.verify(before)
    form = {"keep_previous": "false"}
    await http.post("/rotate", data=form, auth=("operator", SECRET))
    assert len((await http.get("/jwks")).json()["keys"]) == 1


@pytest.mark.parametrize("host", ["evil.test", "127.0.0.1", "localhost:1", "", "0.0.0.0"])
async def test_answers_to_its_own_names_only(http: httpx2.AsyncClient, host: str) -> None:
    answer = await http.get("/jwks", headers={"host": host})
    assert answer.status_code == 421


async def test_answers_to_each_of_its_own_names(
    http: httpx2.AsyncClient, issuer: DevIssuer
) -> None:
    port = issuer.issuer.rpartition(":")[2]
    for name in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
        answer = await http.get("/jwks", headers={"host": f"{name}:{port}"})
        assert answer.status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.test", "null", "http://127.0.0.1:1"])
async def test_answers_no_web_page(http: httpx2.AsyncClient, origin: str) -> None:
    form = {"grant_type": "client_credentials"}
    answer = await http.post(
        "/token", data=form, auth=("operator", SECRET), headers={"origin": origin}
    )
    assert answer.status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.test", "", "127.1.evil"])
def test_serves_loopback_only(host: str) -> None:
    with pytest.raises(NotLoopback):
        settings(host=host)


async def test_a_name_that_is_not_loopback_here_is_refused_at_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``localhost`` is only a name: what counts is the address the socket got."""
    bind = socket.socket.bind
    monkeypatch.setattr(
        socket.socket, "bind", lambda self, address: bind(self, ("0.0.0.0", address[1]))
    )
    with pytest.raises(NotLoopback):
        async with running(settings(host="localhost")):
            pass


@pytest.mark.parametrize(
    "changes",
    [{"secret": "short"}, {"admin_audience": ENGINE}, {"engine_audience": ""}],
)
def test_refuses_unsafe_settings(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"secret|audiences"):
        settings(**changes)


def test_settings_do_not_show_the_secret() -> None:
    assert SECRET not in repr(settings())


async def test_a_taken_port_is_an_error(issuer: DevIssuer) -> None:
    port = int(issuer.issuer.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        async with running(settings(port=port)):
            pass


async def test_serves_ipv6_loopback() -> None:
    async with (
        running(settings(host="::1")) as issuer,
        httpx2.AsyncClient(base_url=issuer.issuer, verify=False, trust_env=False) as http,
    ):
        assert issuer.issuer.startswith("http://[::1]:")
        token = (await ask(http, "reader")).json()["access_token"]
        assert await verifier(http, issuer).verify(token)


# ---- the kept key


def keeping(path: Path, **changes: Any) -> DevIssuer:
    values: dict[str, Any] = {"now": lambda: datetime.now(UTC), "data_dir": path, **changes}
    return DevIssuer("http://127.0.0.1:1", **values)


def test_a_kept_key_survives_a_restart(tmp_path: Path) -> None:
    first = keeping(tmp_path / "new")
    file = tmp_path / "new" / KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert keeping(tmp_path / "new").jwks() == first.jwks()
    first.rotate()
    assert keeping(tmp_path / "new").jwks()["keys"] == first.jwks()["keys"][:1]
    assert list(file.parent.iterdir()) == [file]


def test_another_algorithm_makes_another_key(tmp_path: Path) -> None:
    keeping(tmp_path)
    assert keeping(tmp_path, algorithm="RS256").jwks()["keys"][0]["kty"] == "RSA"
    assert keeping(tmp_path, algorithm="RS256").mint("s", "c", [], "a")


def test_without_a_folder_each_issuer_has_its_own_key() -> None:
    assert keeping(None).jwks() != keeping(None).jwks()  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_others_can_read_is_not_used(tmp_path: Path, mode: int) -> None:
    keeping(tmp_path)
    (tmp_path / KEY_FILE).chmod(mode)
    with pytest.raises(KeyFileUnsafe, match="read by others"):
        keeping(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kty": "EC"}', '{"kty": "RSA", "n": 1}'])
def test_a_damaged_key_is_not_used(tmp_path: Path, content: str) -> None:
    keeping(tmp_path)
    (tmp_path / KEY_FILE).write_text(content)
    with pytest.raises(KeyFileUnsafe, match="damaged"):
        keeping(tmp_path)


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="ES256"):
        keeping(None, algorithm="HS256")  # type: ignore[arg-type]


# ---- as a process

PROGRAM = f"""
from app.devidp.running import DevIssuerSettings, run
run(
    DevIssuerSettings(secret={SECRET!r}, admin_audience={ADMIN!r},
                      inference_audience={INFERENCE!r}, engine_audience={ENGINE!r}),
    ready=lambda issuer: print(issuer.issuer, flush=True),
)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_runs_until_told_to_stop_and_warns_loudly(number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            url = (await process.stdout.readline()).decode().strip()
            async with httpx2.AsyncClient(base_url=url, verify=False, trust_env=False) as http:
                assert (await ask(http, "reader")).status_code == 200
            process.send_signal(number)
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    assert "DEVELOPMENT TOKEN ISSUER" in errors.decode()
    assert SECRET not in errors.decode()
    assert "Traceback" not in errors.decode()
