"""What is seen of the ledger with a limited sight: on both databases as the selectors say."""

from __future__ import annotations

import itertools

import pytest

from app.domain.selectors import EVERYTHING, Selector, Sight
from app.domain.transitions import Cancelled
from app.ledger import Ledger
from app.ledger.sights import APART
from app.ledger.values import AuditFilter, EngineFilter, EventFilter, OperationFilter
from tests.ledger.samples import accept, entry, order, record, registration

pytestmark = pytest.mark.anyio

REGISTER: dict[str, dict[str, str]] = {
    "bare": {},
    "dev": {"env": "dev", "team": "search"},
    "odd": {'a"b': "x", "env": 'de"v'},
    "other": {"env": "dev", "team": "ads"},
    "prod": {"env": "prod", "team": "search"},
    "void": {"env": ""},
}
SELECTORS = [
    Selector(),
    Selector(ids=frozenset({"dev", "gone", "nowhere"})),
    Selector(labels={"env": frozenset({"dev"})}),
    Selector(labels={"env": frozenset({"dev", "prod"}), "team": frozenset({"search"})}),
    Selector(labels={"env": frozenset({""})}),
    Selector(labels={'a"b': frozenset({"x"})}),
    Selector(without={"env": frozenset({"dev"})}),
    Selector(without={"env": frozenset({"dev", "prod"}), "team": frozenset({"ads"})}),
    Selector(ids=frozenset({"dev", "prod"}), without={"env": frozenset({"prod"})}),
]
SIGHTS = [
    EVERYTHING,
    Sight(()),
    *(Sight((one,)) for one in SELECTORS),
    *(Sight(two) for two in itertools.combinations(SELECTORS[1:], 2)),
]


async def test_lists_hold_what_the_selectors_take(ledger: Ledger) -> None:
    labels = {**REGISTER, "gone": {"env": "dev", "team": "search"}}
    for engine_id, own in labels.items():
        await ledger.engines.register(
            registration(engine_id, labels=own), entry("register_engine", engine_id=engine_id)
        )
        operation = await accept(ledger, order(engine_id=engine_id))
        await record(ledger, operation, Cancelled(message=""))
    await ledger.engines.remove("gone", 1, entry("remove_engine", engine_id="gone"))
    await ledger.audit.append(entry("authenticate", "denied"))
    await ledger.audit.append(entry("pause", "refused", engine_id="nowhere"))
    assert await ledger.engines.labels() == labels
    assert await ledger.engines.labels("gone") == {"gone": labels["gone"]}
    assert await ledger.engines.labels("nowhere") == {}
    for sight in SIGHTS:
        seen = {one for one, own in labels.items() if sight.sees(one, own)}
        engines = await ledger.engines.page(EngineFilter(sight=sight))
        assert [engine.id for engine in engines.items] == sorted(seen - {"gone"}), sight
        operations = await ledger.operations.page(OperationFilter(sight=sight))
        assert {operation.engine_id for operation in operations.items} == seen
        events, _ = await ledger.events.after(0, EventFilter(sight=sight))
        assert {stored.event.engine_id for stored in events} == seen
        entries = await ledger.audit.page(AuditFilter(sight=sight), size=100)
        named = {stored.entry.engine_id for stored in entries.items}
        assert named == (seen | {None, "nowhere"} if sight.unlimited else seen)
        for engine_id in ("dev", "prod", "nowhere"):
            found = await ledger.operations.page(OperationFilter(engine_id=engine_id, sight=sight))
            assert len(found.items) == (engine_id in seen)


@pytest.mark.parametrize("visible", [2, APART + 4])
async def test_pages_of_what_is_seen_follow_one_another_without_gaps(
    ledger: Ledger, visible: int
) -> None:
    """However many engines: up to some each is read apart, and beyond all together."""
    for number in range(visible + 2):
        own = {"seen": "yes" if number < visible else "no"}
        await ledger.engines.register(registration(f"e{number:02}", labels=own), entry())
    given = []
    for _turn in range(3):
        for number in range(visible + 2):
            operation = order(engine_id=f"e{number:02}")
            audit = entry(engine_id=operation.engine_id, operation_id=operation.id)
            await record(
                ledger, await accept(ledger, operation, audit=audit), Cancelled(message="")
            )
            if number < visible:
                given.append(operation.id)
    sight = Sight((Selector(labels={"seen": frozenset({"yes"})}),))
    assert await _ids_of_operations(ledger, OperationFilter(sight=sight)) == given[::-1]
    before, found = None, []
    while True:
        page = await ledger.audit.page(AuditFilter(sight=sight), before, size=7)
        found += [stored.entry.operation_id for stored in page.items]
        if page.next is None:
            break
        assert isinstance(page.next, int)
        before = page.next
    assert found == given[::-1]


async def _ids_of_operations(ledger: Ledger, wanted: OperationFilter) -> list[str]:
    before, found = None, []
    while True:
        page = await ledger.operations.page(wanted, before, size=7)
        assert page.next is None or len(page.items) == 7
        found += [operation.id for operation in page.items]
        if page.next is None:
            return found
        assert isinstance(page.next, int)
        before = page.next
