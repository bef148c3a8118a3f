"""What an issuer answers to a refresh, and what becomes of the session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.auth.sessions.errors import SessionEnded
from app.auth.sessions.kept import Visitor
from app.auth.tokens.errors import IssuerUnavailable
from app.devidp.issuer import DevIssuer
from app.ledger.browser_sessions import BrowserSessions, StoredSession
from app.ledger.errors import LedgerUnavailable
from tests.auth.answering import CLIENT, Desk, answering
from tests.auth.conftest import ADMIN, Clock, Origin, Verifiers

pytestmark = pytest.mark.anyio

TTL_S = 300


@pytest.fixture
async def desk(
    origin: Origin,
    issuer: DevIssuer,
    verifiers: Verifiers,
    http: httpx2.AsyncClient,
    clock: Clock,
    tmp_path: Path,
    ledger_url: str,
) -> AsyncIterator[Desk]:
    async with answering(origin, issuer, verifiers, http, clock, tmp_path, ledger_url) as made:
        yield made


async def test_a_good_answer_takes_the_place_of_what_there_was(desk: Desk, clock: Clock) -> None:
    cookie = await desk.session()
    before = await desk.kept(cookie)
    clock.advance(TTL_S - 31)
    await desk.who(cookie)
    assert await desk.kept(cookie) == before, "it is not due yet"
    for refresh, kept in (("r2", "r2"), (..., "r2"), ("r3", "r3")):
        clock.advance(TTL_S)
        given = desk.answers(refresh_token=refresh, id_token=..., sid="x")
        await desk.who(cookie)
        tokens = await desk.kept(cookie)
        assert (tokens.access, tokens.refresh) == (given["access_token"], kept)
        assert tokens.identity == before.identity
    _, form = desk.origin.posted[-1]
    assert (form["grant_type"], form["refresh_token"]) == ("refresh_token", "r2")
    assert "scope" not in form, "what was granted stays, whatever was asked for"
    clock.advance(TTL_S)
    given = desk.answers(refresh_token="r4")
    await desk.who(cookie)
    assert (await desk.kept(cookie)).identity == given["id_token"]
    assert (await desk.stored(cookie)).version == 5


async def test_answers_that_end_the_session(desk: Desk, clock: Clock) -> None:
    mint, stranger = desk.issuer.mint, DevIssuer(desk.origin.url, now=desk.issuer._now)
    identity = {"iss": desk.origin.url, "aud": CLIENT, "sub": "ada"}
    head = {"alg": stranger.algorithm, "kid": stranger.key.kid}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"token_type": "DPoP"}, "REFRESH_UNUSABLE"),
        ({"access_token": ...}, "REFRESH_UNUSABLE"),
        ({"id_claim_sub": "eve"}, "REFRESH_UNUSABLE"),
        ({"id_claim_aud": "another"}, "REFRESH_UNUSABLE"),
        ({"id_token": stranger.sign(identity, head)}, "REFRESH_UNUSABLE"),
        (
            {"access_token": mint("ada", CLIENT, ["admin:read"], "urn:another", 9_000)},
            "REFRESH_UNUSABLE",
        ),
        ({"access_token": mint("eve", CLIENT, ["admin:read"], ADMIN, 9_000)}, "ACTOR_CHANGED"),
        ({"access_token": mint("ada", "eve", ["admin:read"], ADMIN, 9_000)}, "ACTOR_CHANGED"),
    ]
    for changes, reason in cases:
        cookie = await desk.session()
        clock.advance(TTL_S - 20)
        desk.answers(**{"refresh_token": "r2", **changes})
        with pytest.raises(SessionEnded):
            await desk.who(cookie)
        with pytest.raises(SessionEnded):
            await desk.stored(cookie)
        assert (await desk.ends())[0] == reason, changes


async def test_answers_that_do_not(desk: Desk, clock: Clock) -> None:
    cookie = await desk.session()
    good_for_s = TTL_S
    refusals: list[tuple[bytes, int]] = [
        (b'{"error":"invalid_client"}', 401),
        (b'{"error":"temporarily_unavailable"}', 400),
        (b"{}", 500),
    ]
    for body, status in refusals:
        clock.advance(good_for_s - 20)
        desk.origin.say("/token", body, status=status)
        asked = desk.origin.requests["/token"]
        for _ in range(3):
            assert (await desk.who(cookie)).subject == "ada", "its token is good still"
        assert desk.origin.requests["/token"] == asked + 1, "and nobody is asked at once again"
        clock.advance(60)
        for _ in range(3):
            with pytest.raises(IssuerUnavailable):
                await desk.who(cookie)
        assert desk.origin.requests["/token"] == asked + 2
        clock.advance(10)
        desk.answers(refresh_token="r2")
        assert (await desk.who(cookie)).subject == "ada"
    assert await desk.ends() == []


async def test_a_token_that_cannot_be_judged_now_is_kept(desk: Desk, clock: Clock) -> None:
    """The refresh token before it is spent."""
    cookie = await desk.session()
    clock.advance(TTL_S)
    desk.issuer.rotate()
    desk.answers(refresh_token="r2")
    desk.origin.say("/jwks", b"{}", status=500)
    asked = desk.origin.requests["/token"]
    for _ in range(2):
        with pytest.raises(IssuerUnavailable):
            await desk.who(cookie)
    del desk.origin.answers["/jwks"]
    clock.advance(60)
    desk.answers(refresh_token="r3")
    assert (await desk.who(cookie)).subject == "ada"
    assert (await desk.kept(cookie)).refresh == "r3"
    sent = [form["refresh_token"] for _, form in desk.origin.posted[asked:]]
    assert sent == ["r1", "r2"]


class Failing:
    """The store, which is away for so many writes, before or after they are done."""

    def __init__(self, store: BrowserSessions, times: int, *, written: bool) -> None:
        self._store = store
        self._times = times
        self._written = written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def refreshed(self, *args: Any, **how: Any) -> StoredSession | None:
        if self._times:
            self._times -= 1
            if self._written:
                await self._store.refreshed(*args, **how)
            raise LedgerUnavailable("away")
        return await self._store.refreshed(*args, **how)


@pytest.mark.parametrize("written", [False, True])
async def test_a_row_that_could_not_be_written_is_written_again(
    desk: Desk, clock: Clock, written: bool
) -> None:
    cookie = await desk.session()
    clock.advance(TTL_S)
    desk.answers(refresh_token="r2")
    refreshes = desk.house.refreshes
    refreshes._store = Failing(refreshes._store, 1, written=written)  # type: ignore[assignment]
    assert (await desk.who(cookie)).subject == "ada"
    assert (await desk.kept(cookie)).refresh == "r2"


async def test_the_end_of_a_process_waits_for_refreshes_and_not_for_ever(
    desk: Desk, clock: Clock
) -> None:
    cookie = await desk.session()
    clock.advance(TTL_S)
    tokens = desk.tokens("", refresh_token="r2", id_token=...)
    gate = asyncio.Event()
    desk.origin.say("/token", json.dumps(tokens).encode(), gate=gate)
    asking = asyncio.create_task(desk.who(cookie))
    async with asyncio.timeout(60):
        while not desk.house.refreshes._under_way:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await desk.house.aclose(0.05)
    with pytest.raises(IssuerUnavailable):
        await asking
    gate.set()


async def test_a_session_of_an_issuer_at_which_nobody_logs_in_any_more(desk: Desk) -> None:
    cookie = await desk.session()
    desk.house.desk._providers = {}
    with pytest.raises(SessionEnded):
        await desk.stored(cookie)


async def test_logging_out_of_a_session_whose_key_is_gone(desk: Desk) -> None:
    cookie = await desk.session()
    session = await desk.stored(cookie)
    other = StoredSession(
        **{
            **{name: getattr(session, name) for name in StoredSession.__slots__},
            "sealed": b"\x01" + bytes(60),
        }
    )
    assert await desk.house.desk.log_out(other, Visitor()) is None
    with pytest.raises(SessionEnded):
        await desk.stored(cookie)
