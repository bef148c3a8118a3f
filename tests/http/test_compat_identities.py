"""Callers of compatible endpoints that send no token: what proves them, and what does not."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.http.records import record_refused_callers
from app.observability.log import configure_logging
from tests.http.compat_callers import LOCAL, NEXT_SECRET, READ, SECRET, TRAINER, Callers, callers
from tests.http.gateway import Gateway

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Callers]:
    async with callers(tmp_path) as made:
        yield made


def who(name: str, way: str) -> dict[str, Any]:
    return {"who": {"issuer": LOCAL, "subject": name, "client_id": way}, "engine": "e1"}


async def audited(gate: Gateway) -> list[dict[str, Any]]:
    rooms = gate.rooms
    await record_refused_callers(rooms.ledger, rooms.refused_callers, rooms.clock, all_of_them=True)
    return list((await gate.get("/v1/audit?page_size=200")).json()["items"])


async def test_a_socket_proves_its_user(here: Callers) -> None:
    assert here.socket.stat().st_mode & 0o777 == 0o600
    async with here.by_socket() as http:
        assert (await http.get(READ)).json() == who("bysocket", "unix_socket")
        # Nowhere else, and for no more than its scopes.
        for path in ("/v1/engines/e1/seen", "/v1/engines", "/v1/me", "/metrics"):
            assert (await http.get(path)).status_code == 401, path
        refused = await http.post("/compat/vllm/e1/pause", json={})
        assert (refused.status_code, refused.json()["reason"]) == (403, "INSUFFICIENT_SCOPE")
        assert (await http.get("/compat/vllm/e2/seen")).status_code == 404
        # A token that is sent is judged as ever, by itself.
        token = {"Authorization": f"Bearer {here.gate.token('admin:read', subject='eve')}"}
        assert (await http.get(READ, headers=token)).json()["who"]["subject"] == "eve"
        for bad in ("Bearer nonsense", "Basic eDp5", ""):
            assert (await http.get(READ, headers={"Authorization": bad})).status_code == 401, bad
        for marks in ({"Origin": "http://localhost"}, {"Sec-Fetch-Site": "none"}):
            refused = await http.get(READ, headers=marks)
            assert (refused.status_code, refused.json()["reason"]) == (403, "IDENTITY_REFUSED")
    assert (await here.gate.http.get(READ)).status_code == 401  # by TCP, without anything


async def test_a_socket_proves_nobody_else(here: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_of = here.gate.server.lifespan.state["gate"]
    (one, *_) = gate_of.identities._all
    object.__setattr__(one.shows, "uid", os.getuid() + 1)
    async with here.by_socket() as http:
        assert (await http.get(READ)).status_code == 401


async def test_a_secret_in_the_path_counts_within_this_machine(here: Callers) -> None:
    good = await here.by_path(SECRET)
    assert good.json() == who("bypath", "secret_path")
    unknown = await here.by_path(SECRET, engine="e2")
    for wrong in (SECRET[:-1], f"{SECRET}x", "", "~", f"{SECRET}~", "x" * 4000, "%2e%2e", "ü" * 40):
        answer = await here.by_path(wrong)
        assert (answer.status_code, same(answer)) == (404, same(unknown)), wrong
    # Not even with a token that is good.
    assert (await here.by_path("wrong" * 8, **here.gate.auth())).status_code == 404
    assert (await here.by_path(SECRET, **here.gate.auth(subject="eve"))).json()["who"][
        "subject"
    ] == "eve"
    assert (await here.by_path(SECRET, Authorization="Bearer bad")).status_code == 401
    for marks in (
        {"Origin": "http://localhost"},
        {"Sec_Fetch_Site": "cross-site"},
        {"X_Forwarded_For": "10.0.0.1"},
        {"X_Forwarded_Proto": "https"},
        {"Via": "1.1 proxy"},
    ):
        refused = await here.by_path(SECRET, **marks)
        assert (refused.status_code, refused.json()["reason"]) == (403, "IDENTITY_REFUSED"), marks
        assert (await here.by_path("wrong" * 8, **marks)).status_code == 404
    assert (await here.by_path(SECRET, Host="gateway.test")).status_code == 421
    for path in (f"/v1/engines/e1~{SECRET}", f"/compat/vllm/x/e1~{SECRET}/seen"):
        assert (await here.gate.http.get(path)).status_code in (401, 404), path
    # Over the socket its user is known; a secret is for TCP.
    async with here.by_socket() as http:
        assert (await http.get(f"/compat/vllm/e1~{SECRET}/seen")).status_code == 404


def same(answer: httpx2.Response) -> tuple[Any, ...]:
    """All of an answer that is not its own."""
    own = ("request_id", "trace_id", "instance", "x-request-id", "date")
    body = {k: v for k, v in answer.json().items() if k not in own}
    return body, sorted((k, v) for k, v in answer.headers.items() if k not in own)


async def test_a_host_that_is_allowed_is_still_another(tmp_path: Path) -> None:
    async with callers(tmp_path, allowed_hosts=("gateway.test",)) as here:
        refused = await here.by_path(SECRET, Host="gateway.test")
        assert (refused.status_code, refused.json()["reason"]) == (403, "IDENTITY_REFUSED")
        for host in ("localhost", "127.0.0.1:80", "[::1]:1"):
            assert (await here.by_path(SECRET, Host=host)).status_code == 200, host


async def test_a_secret_is_replaced_without_a_restart(here: Callers) -> None:
    for content, good, bad in (
        (f"{SECRET}\n{NEXT_SECRET}\n", (SECRET, NEXT_SECRET), ()),
        (f"{NEXT_SECRET}\n", (NEXT_SECRET,), (SECRET,)),
        ("short\n", (), (SECRET, NEXT_SECRET, "short")),
        ("", (), (SECRET, NEXT_SECRET, "")),
        (f"{SECRET}", (SECRET,), (NEXT_SECRET,)),
    ):
        here.secret_file.write_text(content)
        for secret in good:
            assert (await here.by_path(secret)).status_code == 200
        for secret in bad:
            assert (await here.by_path(secret)).status_code == 404
    here.secret_file.unlink()
    assert (await here.by_path(SECRET)).status_code == 404


async def test_wrong_secrets_are_refusals(tmp_path: Path) -> None:
    async with callers(tmp_path, max_refusals_per_minute=3) as here:
        assert [(await here.by_path("wrong" * 8)).status_code for _ in range(5)] == [
            *(404, 404, 404, 429, 429)
        ]
        assert (await here.by_path(SECRET)).status_code == 200
        rows = [row for row in await audited(here.gate) if row["action"] == "authenticate"]
    assert [row["detail"] for row in rows] == [{"calls": 5, "reasons": {"SECRET_PATH_UNKNOWN": 5}}]


async def test_a_certificate_of_a_named_client(here: Callers) -> None:
    trainer = here.authority.issue("trainer.test")
    async with here.by_certificate(trainer) as http:
        assert (await http.get(READ)).json() == who("bycert", "mtls")
        assert (await http.get("/v1/engines")).status_code == 401
        marks = {"Origin": "https://localhost"}
        assert (await http.get(READ, headers=marks)).status_code == 403
        bad = {"Authorization": "Bearer bad"}
        assert (await http.get(READ, headers=bad)).status_code == 401
        token = here.gate.auth("admin:read", subject="eve")
        assert (await http.get(READ, headers=token)).json()["who"]["subject"] == "eve"
    async with here.by_certificate(here.authority.issue("t", uri=TRAINER)) as http:
        assert (await http.get(READ)).status_code == 200
    async with here.by_certificate(here.authority.issue("other.test")) as http:
        assert (await http.get(READ)).status_code == 401
    ended = here.authority.issue("trainer.test", ended=True)
    for shown in (None, here.others.issue("trainer.test"), ended):
        async with here.by_certificate(shown) as http:
            with pytest.raises(httpx2.TransportError):
                await http.get(READ)


async def test_certificates_and_authorities_are_replaced_without_a_restart(here: Callers) -> None:
    trainer = here.authority.issue("trainer.test")
    (listener,) = here.gate.server._tls
    begun = here.by_certificate(trainer)
    async with begun:
        assert (await begun.get(READ)).status_code == 200
        serial = await shown_at(here, trainer)
        _, key = here.authority.issue("localhost")
        replaced = await shown_at(here, trainer)
        assert replaced != serial
        whole = key.read_bytes()
        key.write_bytes(here.others.issue("localhost")[1].read_bytes())  # of another pair
        assert await shown_at(here, trainer) == replaced
        key.write_bytes(whole)
        open_before = set(listener._open)
        assert (await begun.get(READ)).status_code == 200  # over the connection it has
        assert set(listener._open) <= open_before

        here.client_ca.write_bytes(here.others.path.read_bytes())
        async with here.by_certificate(here.others.issue("trainer.test")) as http:
            assert (await http.get(READ)).status_code == 200
        with pytest.raises(httpx2.TransportError):  # its connection has been ended
            await begun.get(READ)


async def shown_at(here: Callers, client: tuple[Path, Path]) -> str:
    """The serial number of the certificate that the listener shows."""
    context = ssl.create_default_context(cafile=here.authority.path)
    context.load_cert_chain(*client)
    _, writer = await asyncio.open_connection("localhost", here.port, ssl=context)
    serial = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return str(serial)


async def test_who_comes_to_say_nothing_keeps_nobody_out(here: Callers) -> None:
    """So many places for handshakes are soon taken, by strangers."""
    silent = [await asyncio.open_connection("127.0.0.1", here.port) for _ in range(70)]
    try:
        async with here.by_certificate(here.authority.issue("trainer.test")) as http:
            assert (await http.get(READ)).status_code == 200
        oldest, latest = silent[0][0], silent[-1][0]
        with contextlib.suppress(ConnectionError):
            assert await oldest.read() == b"", "it was hung up on"
        assert not latest.at_eof()
    finally:
        for _, writer in silent:
            writer.close()


RULES = """
[[rules]]
name = "people"
who = {{ issuer = "{issuer}" }}
scopes = "as_granted"
engines = "all"

[[rules]]
name = "trainers"
who = {{ issuer = "urn:chadburn:compat-identity", client = ["unix_socket", "secret_path"] }}
scopes = ["admin:read"]
engines = {{ labels = {{ team = "rl" }} }}
"""


async def test_engines_and_the_policy_narrow_what_an_identity_may_do(tmp_path: Path) -> None:
    async with callers(
        tmp_path,
        scopes=("admin:read", "admin:pause"),
        engines={"id": ["e1", "e3"]},
        policy=lambda issuer: RULES.format(issuer=issuer),
    ) as here:
        for engine, team in (("e2", "rl"), ("e3", "rl")):
            made = await here.gate.register(engine, labels={"team": team})
            assert made.status_code == 201, made.text
        async with here.by_socket() as http:
            statuses = [
                (await http.get(f"/compat/vllm/{engine}/seen")).status_code
                for engine in ("e1", "e2", "e3", "e4")
            ]
            # One has no such label, one is not among its engines, and one is not there.
            assert statuses == [404, 404, 200, 404]
            refused = await http.post("/compat/vllm/e3/pause", json={})
            assert (refused.status_code, refused.json()["reason"]) == (403, "REFUSED_BY_POLICY")
        async with here.by_certificate(here.authority.issue("trainer.test")) as http:
            refused = await http.get("/compat/vllm/e3/seen")
            assert (refused.status_code, refused.json()["reason"]) == (403, "REFUSED_BY_POLICY")
        denied = [row for row in await audited(here.gate) if row["outcome"] == "denied"]
    assert [(row["principal"], row["reason"], row["engine"]) for row in denied] == [
        (who("bycert", "mtls")["who"], "REFUSED_BY_POLICY", "e3"),
        (who("bysocket", "unix_socket")["who"], "REFUSED_BY_POLICY", "e3"),
    ]


async def test_no_secret_of_a_path_is_left_anywhere(
    tmp_path: Path, logged: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logging("debug", "json", logged)
    wrong = "canary0wrong0yranac-7Hs2Pd5Xc8Nb4Ge"
    told: dict[str, str] = {}
    async with callers(tmp_path, scopes=("admin:read", "admin:pause")) as here:
        http = here.gate.http

        async def ask(method: str, path: str, **what: Any) -> httpx2.Response:
            answer = await http.request(method, path, **what)
            told[f"{method} {len(told)}"] = f"{answer.headers} {answer.text}"
            return answer

        for secret in (SECRET, wrong):
            key = {"Idempotency-Key": f"pause-{len(told)}", "Prefer": "wait=20"}
            path = f"/compat/vllm/e1~{secret}"
            await ask("POST", f"{path}/pause", json={"mode": "drain"}, headers=key)
            await ask("POST", f"{path}/pause", json={"mode": "nonsense"}, headers=key)
            await ask("GET", f"{path}/seen?what=1")
            await ask("DELETE", f"{path}/seen")
            await ask("GET", f"{path}/nothing")
            await ask("GET", f"/compat/vllm/e1%7E{secret}/seen")
            await ask("GET", f"/compat//vllm/e1~{secret}/seen")
            await ask("GET", f"/Compat/vllm/e1~{secret}/seen")
            await ask("GET", f"{path}/seen", headers={"Origin": "http://localhost"})
            await ask("GET", f"{path}/seen", headers={"Host": "gateway.test"})
            await ask("GET", f"{path}/seen", headers={"Authorization": "Bearer bad"})
        rows = await audited(here.gate)
        told["audit"] = json.dumps(rows)
        pauses = [row for row in rows if row["action"] == "pause"]
        assert {row["principal"]["client_id"] for row in pauses} == {"secret_path"}
        for path in ("/v1/operations", "/v1/events?after=0", "/metrics"):
            told[path] = (await here.gate.get(path, Accept="application/json")).text
        assert "bypath" in told["/v1/operations"]
    told["logs"] = logged.getvalue()
    told["standard output"], told["standard error"] = capfd.readouterr()
    assert '"subject": "bypath"' in told["logs"]
    for place, text in told.items():
        for secret in (SECRET, wrong):
            assert secret[:20] not in text, place
