"""Callers whom a browser's session stands for, as a route's need finds them in the request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.requests import Request

from app.auth.requires import Gate, Need, caller_by_session
from app.auth.sessions.errors import CrossSiteRefused, SessionEnded
from app.auth.sessions.kept import actor_of
from app.auth.tokens.errors import TokenMissing
from app.domain.scopes import Scope
from app.ledger.values import AuditFilter
from app.observability.tracing import RequestIds
from tests.auth.conftest import ADMIN, Verifiers
from tests.auth.housed import BASE, Housed, housed
from tests.devidp.flows import TTL_S

pytestmark = pytest.mark.anyio

IDS = RequestIds("request-1", "7" * 32)
SOURCE = "203.0.113.7"
OWN = (("origin", BASE), ("x-requested-with", "chadburn"))
READ = Need((Scope.READ,))


@pytest.fixture
async def at(tmp_path: Path, ledger_url: str) -> AsyncIterator[Housed]:
    async with housed(tmp_path, ledger_url) as made:
        yield made


def request(gate: Gate, *headers: tuple[str, str], method: str = "GET") -> Request:
    return Request(
        {
            "type": "http",
            "method": method,
            "path": "/v1/engines",
            "raw_path": b"/v1/engines",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers],
            "state": {"gate": gate, "ids": IDS, "source": SOURCE},
        }
    )


async def test_a_cookie_counts_where_no_token_is_shown_and_on_this_gateway_s_own_pages(
    at: Housed, verifiers: Verifiers
) -> None:
    house = at.open()
    cookie = ("cookie", await at.log_in(house))
    gate = Gate(verifiers.make(), sessions=house.desk)
    asked = request(gate, cookie)
    who = await READ.admit(asked)
    assert who.subject == "otto"
    assert asked.state.actor == actor_of(who)
    token = verifiers.issuer.mint("ops", "console", ["admin:read"], ADMIN, 600)
    bearer = ("authorization", f"Bearer {token}")
    assert (await READ.admit(request(gate, cookie, bearer))).subject == "ops"
    for nobody in (request(gate), request(Gate(gate.verifier), cookie)):
        with pytest.raises(TokenMissing):
            await READ.admit(nobody)
    order = request(gate, cookie, method="POST")
    with pytest.raises(CrossSiteRefused):
        await READ.admit(order)
    assert order.state.actor == actor_of(who)
    assert await READ.admit(request(gate, cookie, *OWN, method="POST"))


async def test_what_shows_nobody_at_work_keeps_no_session_from_being_idle(
    at: Housed, verifiers: Verifiers
) -> None:
    house = at.open()
    cookie = ("cookie", await at.log_in(house))
    gate = Gate(verifiers.make(), sessions=house.desk)
    plain = request(gate, cookie, ("accept", "text/html"), ("accept", "application/json"))
    stream = request(gate, cookie, ("accept", "text/html, text/event-stream"))
    began = at.clock()
    at.clock.wait(60)
    for asked in (plain, stream):
        assert await caller_by_session(house.desk, asked, going_on=True)
        assert await READ.again(asked)
    await READ.admit(stream)
    await READ.admit(request(gate, cookie, ("x-chadburn-background", "1")))

    async def seen_at() -> float:
        session = await house.desk.found([cookie[1]])
        assert session is not None
        return (session.seen_at - began).total_seconds()

    assert await seen_at() == 0
    await READ.admit(plain)
    assert await seen_at() == 60


async def test_the_audit_says_at_which_request_a_session_was_found_to_be_over(
    at: Housed, verifiers: Verifiers
) -> None:
    house = at.open(rules={"idle_s": 10 * TTL_S})
    cookie = ("cookie", await at.log_in(house))
    session = await house.desk.found([cookie[1]])
    assert session is not None
    none = replace(house.desk._safe.take(session), refresh=None)  # as other issuers give none
    await at.reseal(session, house.desk._safe.put(session.digest, none))
    at.clock.wait(TTL_S + 30)
    with pytest.raises(SessionEnded):
        await READ.admit(request(Gate(verifiers.make(), sessions=house.desk), cookie))
    entry = (await at.ledger.audit.page(AuditFilter())).items[0].entry
    assert (entry.action, entry.reason) == ("end_session", "TOKEN_EXPIRED")
    found = (entry.request_id, entry.trace_id, entry.source)
    assert found == (IDS.request_id, IDS.trace_id, SOURCE)
