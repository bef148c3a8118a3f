"""The audit's chain of seals, on both databases: what is done to it behind our back is found."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import text

from app.ledger import Ledger
from app.ledger.chain import Verdict, verify
from app.ledger.database import Write
from app.ledger.pruning import Pruned, preview, prune
from app.ledger.sealing import DUTY, DutyLost, seal_all
from app.ledger.seals import GENESIS
from app.ledger.values import AuditFilter
from app.operations.retention import Retention
from app.operations.sealing import Sealer
from tests.ledger.samples import ALICE, START, SetClock, entry

pytestmark = pytest.mark.anyio

AGES = Retention(timedelta(days=30), timedelta(days=60))


async def write_down(ledger: Ledger, clock: SetClock, *actions: str) -> None:
    for action in actions:
        await ledger.audit.append(
            entry(
                action,
                actor=ALICE,
                at=clock.now(),
                detail={"ranks": [0, 1], "share": 0.5, "who": "Grüße"},
                scopes=("admin:pause",),
            )
        )


async def seal(ledger: Ledger) -> None:
    await seal_all(ledger.duties, ledger.sealing, "a test")


async def by_hand(ledger: Ledger, *statements: str) -> None:
    async def work(write: Write) -> None:
        for statement in statements:
            await write.connection.execute(text(statement))

    await ledger.audit._database.write(work)


@pytest.fixture
async def chain(ledger: Ledger, clock: SetClock) -> Ledger:
    """Three seals over the entries 1 2 4, 5 6, and 7; an entry 3 was never there to be sealed."""
    await write_down(ledger, clock, "a", "b", "c", "d")
    await by_hand(ledger, "DELETE FROM audit WHERE id = 3")
    await seal(ledger)
    clock.advance(days=1)
    await write_down(ledger, clock, "e", "f")
    await seal(ledger)
    clock.advance(days=1)
    await write_down(ledger, clock, "g")
    await seal(ledger)
    return ledger


async def test_what_is_sealed_is_verified_and_the_rest_is_named(
    chain: Ledger, ledger_url: str, clock: SetClock
) -> None:
    verdict = await verify(ledger_url)
    assert (verdict.broken, verdict.rows, verdict.seals, verdict.pruned) == (None, 6, 3, None)
    assert verdict.unsealed.rows == 0
    head = verdict.head
    assert head is not None
    assert (head.number, head.from_id, head.to_id, head.row_count) == (3, 7, 7, 1)
    assert head.previous != GENESIS
    await seal(chain)
    assert (await chain.sealing.head()) == head, "a seal is of something"
    await write_down(chain, clock, "h", "i")
    tail = (await verify(ledger_url)).unsealed
    assert (tail.rows, tail.from_id, tail.to_id, tail.oldest_at) == (2, 8, 9, clock.now())
    again = await verify(ledger_url, head.digest)
    assert (again.broken, again.rows, again.seals) == (None, 1, 1), "from the given one on"


COPY = "action, outcome, issuer, subject, client_id, detail, scopes, at"
VALUES = "'pause', 'accepted', NULL, NULL, NULL, '{}', NULL, '2026-03-01 12:00:00.000000+00:00'"


CHANGED: list[tuple[int, dict[int, str], list[str]]] = [
    (2, {5: "changed"}, ["UPDATE audit SET note = 'nothing happened' WHERE id = 5"]),
    (1, {4: "changed"}, ["UPDATE audit SET subject = 'bob' WHERE id = 4"]),
    (1, {1: "changed"}, ["UPDATE audit SET scopes = NULL WHERE id = 1"]),
    (2, {6: "changed"}, ["UPDATE audit SET detail = '{}' WHERE id = 6"]),
    (
        1,
        {2: "changed"},
        ["UPDATE audit SET at = '2026-03-01 12:00:00.123457+00:00' WHERE id = 2"],
    ),
    (1, {2: "removed"}, ["DELETE FROM audit WHERE id = 2"]),
    (2, {5: "removed", 6: "removed"}, ["DELETE FROM audit WHERE id IN (5, 6)"]),
    (3, {7: "removed"}, ["DELETE FROM audit WHERE id = 7"]),
    (
        1,
        {3: "put in"},
        [f"INSERT INTO audit (id, {COPY}) SELECT 3, {COPY} FROM audit WHERE id = 2"],
    ),
    (1, {2: "removed", 3: "put in"}, ["UPDATE audit SET id = 3 WHERE id = 2"]),
    (1, {-5: "put in", 2: "removed"}, ["UPDATE audit SET id = -5 WHERE id = 2"]),
    (
        1,
        {0: "put in"},
        [f"INSERT INTO audit (id, {COPY}) SELECT 0, {COPY} FROM audit WHERE id = 2"],
    ),
    (
        1,
        {},
        [
            "DELETE FROM audit WHERE id IN (1, 4)",
            "UPDATE audit SET id = -5 WHERE id = 2",
            "UPDATE audit_seals SET pruned_at = sealed_at WHERE number = 1",
        ],
    ),
    (
        2,
        {5: "changed", 6: "changed"},
        [
            "UPDATE audit SET id = 99 WHERE id = 5",
            "UPDATE audit SET id = 5 WHERE id = 6",
            "UPDATE audit SET id = 6 WHERE id = 99",
        ],
    ),
    (1, {}, ["UPDATE audit_seals SET row_count = 4 WHERE number = 1"]),
    (1, {}, ["UPDATE audit_seals SET row_count = 9000000000000000000 WHERE number = 1"]),
    (1, {}, ["UPDATE audit_seals SET from_id = 0 WHERE number = 1"]),
    (2, {}, ["UPDATE audit_seals SET fence = 9 WHERE number = 2"]),
    (2, {}, ["UPDATE audit_seals SET sealed_at = '2026-03-09 00:00:00+00:00' WHERE number = 2"]),
    (2, {}, ["UPDATE audit_seals SET form = 7 WHERE number = 2"]),
    (3, {}, ["UPDATE audit_seals SET digest = 'abc' WHERE number = 3"]),
    (2, {}, ["UPDATE audit_seals SET previous = 'abc' WHERE number = 2"]),
    (2, {}, ["UPDATE audit_seals SET marks = 'x:y 5:z' WHERE number = 2"]),
    (3, {}, ["DELETE FROM audit_seals WHERE number = 2"]),
    (2, {}, ["DELETE FROM audit_seals WHERE number = 1"]),
    (2, {}, ["UPDATE audit_seals SET pruned_at = sealed_at WHERE number = 2"]),
    (1, {}, ["UPDATE audit_seals SET pruned_at = sealed_at WHERE number = 1"]),
    (3, {}, ["DELETE FROM audit WHERE id IN (5, 6)", "DELETE FROM audit_seals WHERE number = 2"]),
]


async def test_what_was_done_behind_the_chain_s_back_is_found(
    chain: Ledger, ledger_url: str
) -> None:
    tables = ("audit", "audit_seals")
    keep = [f"CREATE TABLE kept_{name} AS SELECT * FROM {name}" for name in tables]
    back = [f"INSERT INTO {name} SELECT * FROM kept_{name}" for name in tables]
    await by_hand(chain, *keep)
    for number, entries, done in CHANGED:
        await by_hand(chain, *done)
        broken = (await verify(ledger_url)).broken
        assert broken is not None, done
        assert (broken.number, broken.entries) == (number, entries), (done, broken)
        if entries:
            first, how = next(iter(entries.items()))
            assert broken.message.startswith(f"entry {first} was {how}")
        await by_hand(chain, *(f"DELETE FROM {name}" for name in tables), *back)
    assert (await verify(ledger_url)).broken is None


async def test_of_a_great_many_some_are_named(ledger: Ledger, ledger_url: str) -> None:
    """Among what was put in there is still told what was changed in front of it."""
    many = f"""
        INSERT INTO audit (id, {COPY}) WITH RECURSIVE n(i) AS (
            SELECT 10 UNION ALL SELECT i + 10 FROM n WHERE i < 1000
        ) SELECT i, {VALUES} FROM n"""
    between = many.replace("SELECT i, ", "SELECT i + 5, ")
    await by_hand(ledger, many)
    if ledger.audit._database.postgres:
        await by_hand(ledger, "SELECT setval('audit_id_seq', 1000)")
    await seal(ledger)
    assert (await verify(ledger_url)).broken is None
    await by_hand(ledger, between, "UPDATE audit SET note = 'x' WHERE id = 20")
    broken = (await verify(ledger_url)).broken
    assert broken is not None
    assert broken.entries[20] == "changed"
    assert set(broken.entries) == {20, *range(15, 15 + 190, 10)}
    assert set(broken.entries.values()) == {"changed", "put in"}


async def test_a_row_that_cannot_be_read_is_a_break_and_no_crash(
    chain: Ledger, ledger_url: str
) -> None:
    if chain.audit._database.postgres:
        return  # which takes no such thing
    await by_hand(chain, "UPDATE audit SET at = 'never' WHERE id = 6")
    broken = (await verify(ledger_url)).broken
    assert broken is not None
    assert (broken.number, broken.entries) == (2, {6: "changed"})


@pytest.mark.parametrize("forged", ["marks = x'ff'", "sealed_at = 'never'", "fence = 'first'"])
async def test_a_seal_that_cannot_be_read_is_a_break_and_no_crash(
    chain: Ledger, ledger_url: str, forged: str
) -> None:
    if chain.audit._database.postgres:
        return
    await by_hand(chain, f"UPDATE audit_seals SET {forged} WHERE number = 2")
    verdict = await verify(ledger_url)
    said = [one.message for one in verdict.breaks]
    assert said == ["the seal that follows seal 1 cannot be read"]
    assert verdict.seals == 1
    assert verdict.head is not None
    assert verdict.head.number == 1


async def test_an_entry_below_all_seals_is_never_unseen(ledger: Ledger, ledger_url: str) -> None:
    await by_hand(
        ledger,
        "INSERT INTO audit (id, at, action, outcome, detail)"
        " VALUES (-3, '2026-03-01 12:00:00.123457+00:00', 'a', 'accepted', '{}')",
    )
    tail = (await verify(ledger_url)).unsealed
    assert (tail.rows, tail.from_id, tail.to_id) == (1, -3, -3)


async def test_a_clock_that_goes_back_breaks_nothing(
    ledger: Ledger, ledger_url: str, clock: SetClock
) -> None:
    one, other = Sealer(ledger, "one", 60), Sealer(ledger, "other", 60)
    await write_down(ledger, clock, "a")
    assert await one.round() == 1
    clock.advance(days=-1)
    await write_down(ledger, clock, "b")
    assert await one.round() == 1, "it has the duty, whatever time it is"
    clock.advance(days=-1)
    await write_down(ledger, clock, "c")
    assert await other.round() == 1, "nobody can have it for a day: `one` may be no more"
    await write_down(ledger, clock, "d")
    assert await one.round() == 0
    await other.stop()
    clock.advance(days=-1)
    await write_down(ledger, clock, "e")
    assert await one.round() == 1, "it was given back, at a time that is not yet"
    verdict = await verify(ledger_url)
    assert (verdict.broken, verdict.rows, verdict.unsealed.rows) == (None, 5, 0)


async def test_a_chain_made_anew_is_found_by_a_digest_that_was_kept(
    chain: Ledger, ledger_url: str
) -> None:
    head = await chain.sealing.head()
    assert head is not None
    await by_hand(chain, "UPDATE audit SET subject = 'bob' WHERE id = 5", "DELETE FROM audit_seals")
    await seal(chain)
    assert (await verify(ledger_url)).broken is None, "it is a chain, of something else"
    broken = (await verify(ledger_url, head.digest)).broken
    assert broken is not None
    assert "no seal has the given digest" in broken.message


async def test_a_pruned_head_leaves_what_the_chain_hangs_from(
    chain: Ledger, ledger_url: str, clock: SetClock
) -> None:
    kept = await chain.sealing.head()
    assert kept is not None
    await write_down(chain, clock, "h")

    async def pruned(days: float) -> Pruned:
        clock.at = START + timedelta(days=days)
        told = await preview(ledger_url, clock.now(), AGES.cutoffs(clock))
        done = await prune(chain.pruning, AGES.cutoffs(clock), pause_s=0)
        assert told == done.pruned
        return done.pruned

    assert await pruned(59.9) == Pruned()
    assert await pruned(60.5) == Pruned(audit=3)
    verdict = await verify(ledger_url)
    assert (verdict.broken, verdict.rows, verdict.seals) == (None, 3, 2)
    assert verdict.pruned is not None
    assert verdict.pruned.to_id == 4
    assert await pruned(62) == Pruned(audit=3), "what is not sealed stays, however old"
    verdict = await verify(ledger_url, kept.digest)
    assert (verdict.broken, verdict.rows, verdict.unsealed.rows) == (None, 0, 1)
    assert verdict.head is not None
    assert verdict.head.digest == kept.digest
    await seal(chain)
    verdict = await verify(ledger_url, kept.digest)
    assert (verdict.broken, verdict.rows) == (None, 1), "it goes on from the one that is left"
    assert await pruned(63) == Pruned(audit=1)
    (left,) = await seals(chain)
    assert left == 4
    broken = (await verify(ledger_url, kept.digest)).broken
    assert broken is not None
    assert "kept no longer" in broken.message

    await by_hand(chain, f"INSERT INTO audit (id, {COPY}) VALUES (2, {VALUES})")
    broken = (await verify(ledger_url)).broken
    assert broken is not None
    assert broken.message == "1 entries stand where all were pruned"


async def seals(ledger: Ledger) -> list[int]:
    async def work(write: Write) -> list[int]:
        found = await write.connection.execute(text("SELECT number FROM audit_seals ORDER BY 1"))
        return list(found.scalars())

    return await ledger.audit._database.write(work)


async def test_verifying_beside_sealing_and_pruning(
    ledger: Ledger, ledger_url: str, clock: SetClock
) -> None:
    ages = Retention(timedelta(days=5), timedelta(days=5))
    for _ in range(12):
        await write_down(ledger, clock, "a")
        await seal(ledger)
        clock.advance(days=1)

    async def prune_on() -> None:
        for day in range(12, 20, 2):
            clock.at = START + timedelta(days=day)
            await prune(ledger.pruning, ages.cutoffs(clock), pause_s=0)
            await write_down(ledger, clock, "b")
            await seal(ledger)

    verdicts: list[Verdict] = []
    async with asyncio.TaskGroup() as tasks:
        pruning = tasks.create_task(prune_on())
        while not pruning.done():
            verdicts.append(await verify(ledger_url))
    assert [verdict.broken for verdict in verdicts] == [None] * len(verdicts)


async def test_one_of_two_seals_and_the_other_takes_over(
    ledger: Ledger, ledger_url: str, clock: SetClock
) -> None:
    one, other = Sealer(ledger, "one", 60), Sealer(ledger, "other", 60)
    await write_down(ledger, clock, "a", "b")
    assert await one.round() == 2
    await write_down(ledger, clock, "c")
    assert await other.round() == 0, "somebody has the duty"
    clock.advance(seconds=91)  # `one` has been killed, or stands still
    assert await other.round() == 1
    await write_down(ledger, clock, "d")
    assert await one.round() == 0, "who wakes up late writes nothing"
    assert await other.round() == 1
    await write_down(ledger, clock, "e")
    await other.stop()
    assert (await verify(ledger_url)).unsealed.rows == 0
    await write_down(ledger, clock, "f")
    assert await one.round() == 1, "it was given back"
    verdict = await verify(ledger_url)
    assert (verdict.broken, verdict.rows) == (None, 6)
    assert verdict.head is not None
    assert verdict.head.fence == 3


async def test_a_seal_is_made_under_the_duty_or_not_at_all(ledger: Ledger, clock: SetClock) -> None:
    await write_down(ledger, clock, "a")
    old = await ledger.duties.take(DUTY, "one", 10)
    assert old is not None
    assert await ledger.duties.take(DUTY, "one", 10) is None
    clock.advance(seconds=10)
    new = await ledger.duties.take(DUTY, "other", 10)
    assert new is not None
    assert new.fence == 2
    with pytest.raises(DutyLost):
        await ledger.sealing.seal(old, 10)
    assert await ledger.sealing.head() is None
    await ledger.duties.give_back(old)
    assert await ledger.duties.keep(old, 10) is None
    assert await ledger.duties.keep(new, 10) is not None
    sealed, _ = await ledger.sealing.seal(new, 10)
    assert sealed is not None
    assert sealed.fence == 2


async def test_sealers_of_several_gateways_at_once(postgres_url: str) -> None:
    clock = SetClock()
    ledgers = [await Ledger.open(postgres_url, clock=clock, migrate=True) for _ in range(3)]
    try:
        sealers = [Sealer(ledger, f"g{n}", 60) for n, ledger in enumerate(ledgers)]

        async def write(ledger: Ledger) -> None:
            for _ in range(20):
                await write_down(ledger, clock, "a")

        async def seal_on(sealer: Sealer, writing: asyncio.Future[list[None]]) -> None:
            while not writing.done():
                await sealer.round()
                await sealer.stop()

        writing = asyncio.gather(*map(write, ledgers))
        await asyncio.gather(*(seal_on(sealer, writing) for sealer in sealers))
        await seal(ledgers[0])
        verdict = await verify(postgres_url)
        assert (verdict.broken, verdict.rows, verdict.unsealed.rows) == (None, 60, 0)
        assert verdict.seals > 1
    finally:
        for ledger in ledgers:
            await ledger.close()


async def test_nothing_is_sealed_behind_an_open_writer(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever writes: this one takes no part in anything, as an older release or a person would."""
    clock = SetClock()
    ledger = await Ledger.open(postgres_url, clock=clock, migrate=True)
    try:
        duty = await ledger.duties.take(DUTY, "me", 60)
        assert duty is not None
        with ledger.audit._database._engine.connect() as slow:
            columns = "at, action, outcome, detail"
            values = "now(), 'slow', 'accepted', '{}'"
            slow.execute(text(f"INSERT INTO audit ({columns}) VALUES ({values})"))
            await write_down(ledger, clock, "fast")
            made, duty = await ledger.sealing.seal(duty, 60, patience_s=0)
            assert made is None, "the slow one has a lower id, and is not to be seen yet"
            assert "does not end" in caplog.text
            slow.commit()
        made, _ = await ledger.sealing.seal(duty, 60, patience_s=0)
        assert made is not None
        assert (made.from_id, made.to_id, made.row_count) == (1, 2, 2)
        actions = [one.entry.action for one in (await ledger.audit.page(AuditFilter())).items]
        assert actions == ["fast", "slow"]
        assert (await verify(postgres_url)).broken is None
    finally:
        await ledger.close()


async def test_the_sealer_outlasts_a_database_that_is_away(
    ledger: Ledger, ledger_url: str, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so when the last seal is not the one that it has made."""
    sealer = Sealer(ledger, "me", 60)
    await write_down(ledger, clock, "a")
    await sealer.round()
    await by_hand(ledger, "UPDATE audit_seals SET digest = 'abc'")
    await write_down(ledger, clock, "b")
    await sealer.round()
    assert "is not the one that was made" in caplog.text
    assert (await verify(ledger_url)).broken is not None
    await ledger.close()
    await sealer.stop()
    assert "left to be sealed by another gateway" in caplog.text
