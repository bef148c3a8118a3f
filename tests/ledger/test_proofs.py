"""A proof of possession counts once, whichever gateway it is shown to."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from app.ledger import Ledger
from tests.ledger.samples import SetClock

pytestmark = pytest.mark.anyio


async def test_a_proof_counts_once(ledger: Ledger, clock: SetClock) -> None:
    until = clock.now() + timedelta(seconds=90)
    assert await ledger.proofs.first_use("a", until)
    assert not await ledger.proofs.first_use("a", until)
    assert await ledger.proofs.first_use("b", until)


async def test_of_many_that_come_at_once_one_is_the_first(ledger: Ledger, clock: SetClock) -> None:
    until = clock.now() + timedelta(seconds=90)
    won = await asyncio.gather(*(ledger.proofs.first_use("a", until) for _ in range(20)))
    assert won.count(True) == 1


async def test_of_two_gateways_one_is_the_first(postgres_url: str, clock: SetClock) -> None:
    until = clock.now() + timedelta(seconds=90)
    one = await Ledger.open(postgres_url, clock=clock, migrate=True)
    other = await Ledger.open(postgres_url, clock=clock)
    try:
        won = await asyncio.gather(
            *(ledger.proofs.first_use(f"p{n}", until) for n in range(20) for ledger in (one, other))
        )
        assert won.count(True) == 20
    finally:
        await other.close()
        await one.close()


async def test_what_is_too_old_to_be_shown_is_forgotten(ledger: Ledger, clock: SetClock) -> None:
    now = clock.now()
    for name, seconds in (("old", 0), ("young", 1)):
        await ledger.proofs.first_use(name, now + timedelta(seconds=seconds))
    assert not await ledger.proofs.forget_expired()
    assert not await ledger.proofs.first_use("young", now)
    assert await ledger.proofs.first_use("old", now)
