"""A ledger that comes from a backup must not meet a gateway that remembers a later one."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from app.ledger import Ledger
from app.ledger.errors import LedgerInUse
from app.ledger.schema import upgrade
from tests.ledger.samples import SetClock

pytestmark = pytest.mark.anyio

_SHARED = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1128414562"


async def _is_known(url: str) -> None:
    """What says that the ledger is open is said beside its opening."""
    async with asyncio.timeout(30):
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            while connection.execute(_SHARED).fetchone() == (0,):  # noqa: ASYNC110 - a database is asked
                await asyncio.sleep(0.01)


async def test_it_gets_no_new_identity_while_a_gateway_has_it(
    postgres_url: str, clock: SetClock
) -> None:
    ledger = await Ledger.open(postgres_url, clock=clock, migrate=True)
    try:
        await _is_known(postgres_url)
        await upgrade(postgres_url)
        with pytest.raises(LedgerInUse, match="gateway"):
            await upgrade(postgres_url, restored=True)
    finally:
        await ledger.close()
    await upgrade(postgres_url, restored=True)
    again = await Ledger.open(postgres_url, clock=clock)
    try:
        assert again.identity != ledger.identity
    finally:
        await again.close()
