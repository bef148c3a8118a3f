"""Logging in to a real gateway at a real issuer, and what is kept of it."""

from __future__ import annotations

import asyncio
import logging
import signal
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

from app.settings import IssuerSettings
from tests.cli.conftest import Ran, Run
from tests.cli.people import (
    ISSUER_SECRET,
    Terminal,
    change,
    kept,
    kept_anything,
    logs_in_as,
    only_login,
    picks,
    refuses,
)
from tests.e2e.processes import COMMAND, environment
from tests.http.gateway import Gateway, gateway
from tests.idp.oidc_provider.running import ADMIN, real_provider

pytestmark = pytest.mark.anyio

Call = Callable[..., Awaitable[Ran]]
LOGIN = ("login", "--no-browser", "--url")


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """A gateway of this process logs to where the command prints."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.fixture(scope="module")
async def gate(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path_factory.mktemp("gateway") / "data", registered=False) as made:
        yield made


@pytest.fixture
def call(run: Run) -> Call:
    """The command in a thread: the gateway and its issuer run in this one."""
    return lambda *arguments: asyncio.to_thread(run, *arguments)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config"


async def log_in(
    call: Call,
    patch: pytest.MonkeyPatch,
    gate: Gateway,
    act: Callable[[str], None],
    *arguments: str,
) -> tuple[Ran, str]:
    """How it ended, and what was on the terminal."""
    terminal = Terminal(act)
    with patch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        ran = await call(*LOGIN, gate.url, *arguments)
    return ran, terminal.getvalue()


async def test_a_login_serves_every_command(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    ran, shown = await log_in(call, monkeypatch, gate, picks("otto"))
    assert ran.code == 0, shown
    assert ran.out.startswith(f"logged in at {gate.url} as otto (admin:abort admin:cache ")
    assert "compare the code there:" in shown
    token = (await call("token", "--url", f"{gate.url}/")).out
    assert token == f"{kept(config)['access_token']}\n"
    assert token.strip() not in shown
    assert "weights.unsafe" not in kept(config)["parameters"]["scope"]
    assert (await call("engines", "list", "--url", gate.url)).code == 0
    refused = await call("engines", "thaw", "e1", "--url", gate.url)
    assert (refused.code, "admin:engines" in refused.err) == (6, True)
    # What was given counts more than what is kept.
    given = await call("engines", "list", "--url", gate.url, "--token", "garbage")
    assert (given.code, "TOKEN_MALFORMED" in given.err) == (6, True)


async def test_a_second_login_ends_the_first_at_the_issuer(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    await log_in(call, monkeypatch, gate, picks("otto"))
    before = kept(config)
    for person in ("otto", "vera"):
        ran, shown = await log_in(call, monkeypatch, gate, picks(person))
        assert ran.code == 0, shown
        assert await refreshes_with(gate, before["refresh_token"]) == "invalid_grant"
        before = kept(config)
    # One that is damaged, or that its issuer can't be told of, does not keep anybody out.
    change(config, issuer="http://127.0.0.1:9")
    ran, shown = await log_in(call, monkeypatch, gate, picks("otto"))
    assert (ran.code, "may still take the tokens of the login before: " in shown) == (0, True)
    only_login(config).write_text("{")
    ran, shown = await log_in(call, monkeypatch, gate, picks("otto"))
    assert ran.code == 0, shown
    change(config, expires_at=0)
    assert (await call("engines", "list", "--url", gate.url)).code == 0


async def refreshes_with(gate: Gateway, refresh_token: str) -> str | None:
    form = {"grant_type": "refresh_token", "refresh_token": refresh_token, "client_id": "chadburn"}
    async with httpx2.AsyncClient() as http:
        answer = await http.post(f"{gate.issuer.issuer}/token", data=form)
    return None if answer.status_code == 200 else str(answer.json()["error"])


async def test_it_is_kept_for_its_user_alone(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    await log_in(call, monkeypatch, gate, picks("vera"))
    folder = config / "chadburn"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".lock"]


async def test_another_gateway_is_shown_nothing(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await log_in(call, monkeypatch, gate, picks("vera"))
    for other in (f"{gate.url}0", f"{gate.url}/path", gate.url.replace("127.0.0.1", "localhost")):
        ran = await call("token", "--url", other)
        assert (ran.code, "chadburn login" in ran.err) == (2, True)
    ran = await call("engines", "list", "--url", f"{gate.url}0")
    assert (ran.code, "chadburn login" in ran.err) == (2, True)


async def test_the_token_is_renewed_where_it_is_due(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    await log_in(call, monkeypatch, gate, picks("tara"), "--scope", "admin:read")
    before = kept(config)
    change(config, expires_at=before["expires_at"] - before["lifetime_s"])
    first = await call("token", "--url", gate.url)
    after = kept(config)
    assert first.out == f"{after['access_token']}\n"
    assert after["access_token"] != before["access_token"]
    assert after["refresh_token"] != before["refresh_token"]
    assert {**after, **tokens(before)} == {**before, "expires_at": before["expires_at"]}
    assert (await call("token", "--url", gate.url)).out == first.out
    assert (await call("engines", "list", "--url", gate.url)).code == 0


def tokens(login: dict[str, Any]) -> dict[str, Any]:
    return {name: login[name] for name in ("access_token", "refresh_token", "expires_at")}


async def test_processes_at_the_same_moment_renew_it_once(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    """The issuer ends a login whose refresh token is shown twice: were both to renew it, nobody
    could later."""
    await log_in(call, monkeypatch, gate, picks("vera"))
    change(config, expires_at=0)
    several = await asyncio.gather(*(command("token", gate, config) for _ in range(2)))
    assert {code for code, _, _ in several} == {0}
    assert len({out for _, out, _ in several}) == 1
    change(config, expires_at=0)
    assert (await call("token", "--url", gate.url)).code == 0


async def command(verb: str, gate: Gateway, config: Path) -> tuple[int | None, str, str]:
    process = await start(verb, gate, config)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def start(verb: str, gate: Gateway, config: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        verb,
        "--url",
        gate.url,
        env=environment(XDG_CONFIG_HOME=str(config)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_a_login_that_is_interrupted_leaves_the_one_before(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    await log_in(call, monkeypatch, gate, picks("vera"))
    before = only_login(config).read_bytes()
    process = await start("login", gate, config)
    try:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while b"Waiting" not in await process.stderr.readline():
                pass
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert only_login(config).read_bytes() == before
    assert not list((config / "chadburn").glob(".*"))


async def test_a_login_that_is_refused_keeps_nothing(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    ran, shown = await log_in(call, monkeypatch, gate, refuses)
    assert (ran.code, ran.out) == (6, "")
    assert shown.endswith("the login was refused\n")
    assert not kept_anything(config)


async def test_a_token_that_the_gateway_does_not_take_is_not_kept(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    ran, shown = await log_in(call, monkeypatch, gate, picks("vera"), "--scope", "openid")
    assert ran.code == 6
    assert "gave a token that the gateway does not take" in shown
    assert not kept_anything(config)


async def test_logging_out_ends_it_at_the_issuer(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    await log_in(call, monkeypatch, gate, picks("vera"))
    login = kept(config)
    assert (await call("logout", "--url", gate.url)).out == f"logged out at {gate.url}\n"
    assert not list((config / "chadburn").glob("*.json"))
    form = {
        "grant_type": "refresh_token",
        "refresh_token": login["refresh_token"],
        "client_id": "chadburn",
    }
    answer = await gate.http.post(f"{gate.issuer.issuer}/token", data=form)
    assert answer.json()["error"] == "invalid_grant"
    again = await call("logout", "--url", gate.url)
    assert (again.code, again.out) == (0, f"not logged in at {gate.url}\n")
    assert (await call("token", "--url", gate.url)).code == 2


async def test_logging_out_deletes_it_whatever_the_issuer_says(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    await log_in(call, monkeypatch, gate, picks("vera"))
    change(config, issuer="http://127.0.0.1:1")
    ran = await call("logout", "--url", gate.url)
    assert ran.code == 7
    assert "deleted here, but its issuer may still take its tokens" in ran.err
    assert not list((config / "chadburn").glob("*.json"))


async def test_a_login_that_has_ended_says_so(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    await log_in(call, monkeypatch, gate, picks("vera"))
    revoked = {"token": kept(config)["refresh_token"], "client_id": "chadburn"}
    answer = await gate.http.post(f"{gate.issuer.issuer}/revoke", data=revoked)
    assert answer.status_code == 200
    change(config, expires_at=0)
    ran = await call("engines", "list", "--url", gate.url)
    assert (ran.code, ran.out) == (6, "")
    assert f"has ended, says {gate.issuer.issuer}: chadburn login --url" in ran.err
    change(config, refresh_token=None)
    ran = await call("token", "--url", gate.url)
    assert (ran.code, "has expired" in ran.err) == (6, True)


async def test_while_the_issuer_is_down_a_token_serves_to_its_end(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    await log_in(call, monkeypatch, gate, picks("vera"))
    login = kept(config)
    # Due, as sixty seconds are left or fewer, and still good.
    soon = login["expires_at"] - login["lifetime_s"] + 30
    change(config, issuer="http://127.0.0.1:1", expires_at=soon)
    assert (await call("token", "--url", gate.url)).out == f"{login['access_token']}\n"
    change(config, expires_at=0)
    ran = await call("token", "--url", gate.url)
    assert (ran.code, ran.out) == (7, "")


@pytest.mark.parametrize("way", ["variable", "file", "stdin"])
async def test_a_program_logs_in_with_its_secret(
    call: Call,
    gate: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    config: Path,
    tmp_path: Path,
    way: str,
) -> None:
    arguments: tuple[str, ...] = ("--client-credentials", "--client-id", "reader")
    secret = tmp_path / "secret"
    secret.write_text(f"{ISSUER_SECRET}\n")
    if way == "variable":
        monkeypatch.setenv("CHADBURN_CLIENT_SECRET", ISSUER_SECRET)
    else:
        where = str(secret) if way == "file" else "-"
        arguments += ("--client-secret-file", where)
    with secret.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        ran = await call(*LOGIN, gate.url, *arguments)
    assert ran.out == f"logged in at {gate.url} as reader (admin:read)\n", ran.err
    assert (ISSUER_SECRET in only_login(config).read_text()) == (way == "stdin")
    change(config, expires_at=0)
    token = (await call("token", "--url", gate.url)).out
    assert token == f"{kept(config)['access_token']}\n"
    assert (await call("engines", "list", "--url", gate.url)).code == 0
    secret.unlink()
    monkeypatch.delenv("CHADBURN_CLIENT_SECRET", raising=False)
    change(config, expires_at=0)
    ran = await call("token", "--url", gate.url)
    assert ran.code == (0 if way == "stdin" else 2)


async def test_a_program_s_secret_is_needed_and_right(
    call: Call, gate: Gateway, monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    program = (*LOGIN, gate.url, "--client-credentials", "--client-id", "reader")
    ran = await call(*program)
    assert (ran.code, "CHADBURN_CLIENT_SECRET" in ran.err) == (2, True)
    ran = await call(*program, "--client-secret-file", str(tmp_path / "none"))
    assert ran.code == 2
    monkeypatch.setenv("CHADBURN_CLIENT_SECRET", "wrong-" * 4)
    ran = await call(*program)
    assert (ran.code, "invalid_client" in ran.err) == (6, True)
    assert "wrong-" not in ran.err
    assert not kept_anything(config)


async def test_a_real_provider_s_devices_and_refresh_tokens(
    call: Call, monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    with real_provider() as provider:
        trusted = IssuerSettings(issuer=provider.issuer)
        async with gateway(
            tmp_path / "data", registered=False, issuers=(trusted,), audience=ADMIN
        ) as gate:
            wanted = ("--scope", "openid offline_access admin:read admin:pause")
            ran, shown = await log_in(call, monkeypatch, gate, logs_in_as("nadia"), *wanted)
            assert ran.out == f"logged in at {gate.url} as nadia (admin:pause admin:read)\n", shown
            before = kept(config)
            assert before["parameters"]["resource"] == ADMIN
            change(config, expires_at=0)
            assert (await call("engines", "list", "--url", gate.url)).code == 0
            assert kept(config)["refresh_token"] != before["refresh_token"]
            assert (await call("logout", "--url", gate.url)).code == 0
            async with httpx2.AsyncClient() as http:
                answer = await http.post(
                    f"{provider.issuer}/token",
                    data={
                        "grant_type": "refresh_token",
                        "refresh_token": before["refresh_token"],
                        "client_id": "chadburn",
                    },
                )
            assert answer.json()["error"] == "invalid_grant"
