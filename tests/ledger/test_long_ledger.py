"""A long ledger answers about as fast as a short one."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.ledger.integrity import examine
from app.ledger.schema import upgrade
from tests.benchmarks import long_ledger
from tests.benchmarks.long_ledger import in_turns
from tests.ledger.samples import SetClock

pytestmark = [pytest.mark.anyio, pytest.mark.long]


@pytest.mark.timeout(1200)
async def test_what_is_asked_does_not_grow_with_what_there_is(
    ledger_url: str, tmp_path: Path, clock: SetClock
) -> None:
    """Ten times the aim: whatever has to read through it all takes far longer than that."""
    await upgrade(ledger_url)
    seen = []
    for count, behind in ((10_000, 0), (200_000, 20_000)):
        ledger = await long_ledger.filled(ledger_url, count, behind=behind)
        try:
            calls = await long_ledger.calls(ledger, count)
            seen.append({name: (await in_turns(call))[0] for name, call in calls.items()})
        finally:
            await ledger.close()
    short, long = seen
    assert {name: long[name] / short[name] for name in short if long[name] > 15 * short[name]} == {}
    assert (await examine(ledger_url, clock)).findings == ()
