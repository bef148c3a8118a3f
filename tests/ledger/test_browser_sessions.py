"""Sessions of people in a browser: begun, seen, refreshed by one, and over, on both databases."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from app.domain.operation import Actor
from app.ledger import Ledger
from app.ledger.browser_sessions import ProviderLogout, StoredSession
from app.ledger.values import AuditEntry, AuditFilter
from tests.ledger.samples import ALICE, BOB, START, SetClock, entry

pytestmark = pytest.mark.anyio

HOUR = timedelta(hours=1)
MOST = 3


def session(digest: str = "d1", **changes: Any) -> StoredSession:
    values: dict[str, Any] = {
        "digest": digest,
        "actor": ALICE,
        "login_subject": "alice at the issuer",
        "provider_session": f"sid of {digest}",
        "sealed": b"\x00sealed\xff",
        "access_ends_at": START + timedelta(minutes=5),
        "started_at": START,
        "seen_at": START,
        "over_at": START + HOUR,
        "ends_at": START + 12 * HOUR,
    }
    return StoredSession(**values | changes)


async def begin(ledger: Ledger, one: StoredSession, **more: Any) -> None:
    audit = entry("login", actor=one.actor)
    await ledger.browser_sessions.begin(
        one, **{"audit": audit, "ended": ended, "most": MOST, **more}
    )


def ended(actor: Actor, reason: str) -> AuditEntry:
    return entry("end_session", actor=actor, reason=reason)


async def ends(ledger: Ledger) -> list[tuple[str, str | None]]:
    rows = (await ledger.audit.page(AuditFilter(action="end_session"))).items
    return [(row.entry.actor.subject, row.entry.reason) for row in rows if row.entry.actor]


def logout(once: str = "word", **named: Any) -> ProviderLogout:
    values: dict[str, Any] = {"login_subject": None, "provider_session": None, **named}
    return ProviderLogout(issuer=ALICE.issuer, once=once, until=START + HOUR, **values)


def told(actor: Actor) -> AuditEntry:
    return entry("logout", actor=actor)


async def actions(ledger: Ledger) -> list[tuple[str, str]]:
    rows = (await ledger.audit.page(AuditFilter())).items
    return [(row.entry.action, row.entry.actor.subject) for row in rows if row.entry.actor]


async def test_it_comes_out_as_it_went_in(ledger: Ledger) -> None:
    await begin(ledger, session())
    await begin(ledger, session("d2", provider_session=None))
    store = ledger.browser_sessions
    assert await store.get("d1") == session()
    assert await store.get("d2") == session("d2", provider_session=None)
    assert await store.get("d3") is None
    assert await actions(ledger) == [("login", "alice")] * 2


async def test_a_new_one_ends_those_it_takes_the_place_of(ledger: Ledger) -> None:
    await begin(ledger, session("old", actor=BOB, login_subject="bob"))
    await begin(ledger, session("new"), instead_of=["old", "never was"])
    assert await ledger.browser_sessions.get("old") is None
    assert await ledger.browser_sessions.get("new") is not None
    assert await ends(ledger) == [("bob", "SESSION_REPLACED")]


async def test_one_whose_time_was_up_ended_by_that(ledger: Ledger) -> None:
    await begin(ledger, session("old"))
    await begin(ledger, session("new", started_at=START + HOUR), instead_of=["old"])
    assert await ledger.browser_sessions.get("old") is None
    assert await ends(ledger) == []


async def test_of_one_person_s_the_newest_stay(ledger: Ledger) -> None:
    await begin(ledger, session("bob's", actor=BOB, login_subject="bob"))
    for number in range(MOST + 2):
        at = START + timedelta(seconds=number)
        await begin(ledger, session(f"d{number}", started_at=at))
    left = [one for one in range(MOST + 2) if await ledger.browser_sessions.get(f"d{one}")]
    assert left == [2, 3, 4]
    assert await ends(ledger) == [("alice", "SESSIONS_TOO_MANY")] * 2
    assert await ledger.browser_sessions.get("bob's") is not None
    # Clocks that differ: the one that was just begun stays all the same.
    await begin(ledger, session("late", started_at=START - HOUR))
    assert await ledger.browser_sessions.get("late") is not None


async def test_use_is_noted_and_never_brings_one_back(ledger: Ledger, clock: SetClock) -> None:
    store = ledger.browser_sessions
    await begin(ledger, session())
    clock.advance(minutes=1)
    await store.seen("d1", clock.now() + HOUR)
    await store.seen("none", clock.now() + HOUR)
    assert await store.get("d1") == session(seen_at=clock.now(), over_at=clock.now() + HOUR)
    assert await store.get("none") is None


async def test_one_of_many_refreshes(ledger: Ledger, clock: SetClock) -> None:
    store, until = ledger.browser_sessions, clock.now() + timedelta(seconds=30)
    await begin(ledger, session())
    won = await asyncio.gather(
        *(store.claim_refresh("d1", 1, f"r{number}", until) for number in range(8))
    )
    assert won.count(True) == 1
    refresher = f"r{won.index(True)}"
    new: dict[str, Any] = {"sealed": b"new", "access_ends_at": START + HOUR}
    assert await store.refreshed("d1", 1, "another", **new) is None
    stored = await store.refreshed("d1", 1, refresher, **new)
    assert stored == session(**new, version=2)
    assert await store.refreshed("d1", 1, refresher, **new) == stored, "its answer was lost"
    assert not await store.claim_refresh("d1", 1, "late", until), "of tokens that are spent"
    assert await store.claim_refresh("d1", 2, "next", until)


async def test_of_two_gateways_one_refreshes(postgres_url: str, clock: SetClock) -> None:
    one = await Ledger.open(postgres_url, clock=clock, migrate=True)
    other = await Ledger.open(postgres_url, clock=clock)
    until = clock.now() + timedelta(seconds=30)
    try:
        for number in range(10):
            await begin(one, session(f"d{number}", login_subject=str(number)))
        won = await asyncio.gather(
            *(
                ledger.browser_sessions.claim_refresh(f"d{number}", 1, name, until)
                for number in range(10)
                for name, ledger in (("one", one), ("other", other))
            )
        )
        assert won.count(True) == 10
    finally:
        await other.close()
        await one.close()


async def test_a_refresher_that_says_nothing_more_is_followed_by_another(
    ledger: Ledger, clock: SetClock
) -> None:
    store = ledger.browser_sessions
    await begin(ledger, session())
    assert await store.claim_refresh("d1", 1, "first", clock.now() + timedelta(seconds=30))
    clock.advance(seconds=30)
    assert await store.claim_refresh("d1", 1, "second", clock.now() + timedelta(seconds=30))
    new: dict[str, Any] = {"sealed": b"new", "access_ends_at": START + HOUR}
    assert await store.refreshed("d1", 1, "first", **new) is None
    await store.give_up_refresh("d1", "first", clock.now())
    assert await store.refreshed("d1", 1, "second", **new) is not None


async def test_a_refresh_that_came_to_nothing_is_followed_by_a_pause(
    ledger: Ledger, clock: SetClock
) -> None:
    store, until = ledger.browser_sessions, clock.now() + timedelta(seconds=30)
    await begin(ledger, session())
    assert await store.claim_refresh("d1", 1, "first", until)
    await store.give_up_refresh("d1", "first", clock.now() + timedelta(seconds=5))
    assert not await store.claim_refresh("d1", 1, "second", until)
    clock.advance(seconds=5)
    assert await store.claim_refresh("d1", 1, "second", until)


async def test_one_that_has_ended_stays_so(ledger: Ledger, clock: SetClock) -> None:
    store = ledger.browser_sessions
    await begin(ledger, session())
    assert await store.claim_refresh("d1", 1, "me", clock.now() + HOUR)
    assert await store.end("d1", told(ALICE))
    assert not await store.end("d1", told(ALICE))
    assert await store.refreshed("d1", 1, "me", sealed=b"x", access_ends_at=START) is None
    assert await store.get("d1") is None
    assert await actions(ledger) == [("logout", "alice"), ("login", "alice")]


@pytest.mark.parametrize(
    ("named", "left"),
    [
        ({"provider_session": "sid of d1"}, ["d2", "d3", "d4"]),
        ({"login_subject": "alice at the issuer"}, ["d3", "d4"]),
        (
            {"provider_session": "sid of d2", "login_subject": "alice at the issuer"},
            ["d1", "d3", "d4"],
        ),
        ({"provider_session": "sid of d3", "login_subject": "alice at the issuer"}, None),
        ({"provider_session": "sid of d4"}, None),
    ],
)
async def test_an_issuer_ends_what_it_names(
    ledger: Ledger, named: dict[str, str], left: list[str] | None
) -> None:
    foreign = Actor("https://other.test", "alice", "cli")
    every = {
        "d1": session("d1"),
        "d2": session("d2"),
        "d3": session("d3", actor=BOB, login_subject="bob"),
        "d4": session("d4", actor=foreign),
    }
    for one in every.values():
        await begin(ledger, one)
    left = list(every) if left is None else left
    ended = await ledger.browser_sessions.end_by_provider(logout(**named), told)
    assert ended == len(every) - len(left)
    assert [one for one in every if await ledger.browser_sessions.get(one)] == left
    assert [action for action, _ in await actions(ledger)].count("logout") == ended


async def test_an_issuer_s_word_counts_once(ledger: Ledger) -> None:
    store = ledger.browser_sessions
    word = logout(login_subject="alice at the issuer")
    await begin(ledger, session())
    assert await store.end_by_provider(word, told) == 1
    await begin(ledger, session())
    assert await store.end_by_provider(word, told) is None
    assert await store.get("d1") is not None
    assert await store.end_by_provider(replace(word, once="another"), told) == 1
    with pytest.raises(ValueError, match="names"):
        await store.end_by_provider(logout(), told)


async def test_those_whose_time_is_up_are_forgotten(ledger: Ledger, clock: SetClock) -> None:
    store = ledger.browser_sessions
    await begin(ledger, session("d1", over_at=START))
    await begin(ledger, session("d2", over_at=START + timedelta(microseconds=1)))
    assert not await store.forget_over()
    assert await store.get("d1") is None
    assert await store.get("d2") is not None
