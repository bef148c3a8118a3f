"""The order log with several ranks: one sequence, an acknowledgement from each."""

from __future__ import annotations

import asyncio

import pytest

from app.reference_engine.channel import Issued, OrderLog
from app.reference_engine.errors import OrderRejected, RankLost
from app.reference_engine.messages import Ack, Done, Entry, Probe, ReadLoad
from app.reference_engine.wire import HEADER, decode_body

pytestmark = pytest.mark.anyio


class Line:
    """A rank's connection that only remembers what was sent."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def send(self, frame: bytes) -> None:
        self.entries += decode_body(frame[HEADER.size :])


class Ranks:
    def __init__(self, count: int) -> None:
        self.lines = {rank: Line() for rank in range(count)}
        self.overdue: list[int] = []
        self.log = OrderLog(dict(self.lines), self._blame)

    async def _blame(self, issued: Issued) -> tuple[int, ...]:
        """The front end's part, which knows more than who did not answer."""
        self.overdue.append(issued.entry.index)
        return issued.missing


def ack(index: int, rank: int, error: str | None = None) -> Ack:
    return Ack(index=index, rank=rank, result=None if error else Done(), error=error)


async def test_orders_are_numbered_and_go_to_the_first_rank_alone() -> None:
    ranks = Ranks(4)
    ranks.log.issue(Probe())
    ranks.log.issue(ReadLoad())
    assert ranks.lines[0].entries == [Entry(1, Probe()), Entry(2, ReadLoad())]
    assert not any(ranks.lines[rank].entries for rank in (1, 2, 3))


async def test_every_rank_answers_for_itself() -> None:
    ranks = Ranks(3)
    issued = ranks.log.issue(Probe())
    for rank, error in ((2, None), (0, "no"), (1, None)):
        assert not issued.complete
        ranks.log.settle(ack(1, rank, error))
    assert issued.complete
    assert await issued.ack(1, 1.0) == Done()
    with pytest.raises(OrderRejected, match="rank 0 rejected the order: no"):
        await issued.ack(0, 1.0)


async def test_answers_are_matched_by_number_whatever_their_order() -> None:
    ranks = Ranks(1)
    first, second = ranks.log.issue(Probe()), ranks.log.issue(Probe())
    ranks.log.settle(ack(2, 0, "second"))
    ranks.log.settle(ack(1, 0, "first"))
    with pytest.raises(OrderRejected, match="first"):
        await first.ack(0, 1.0)
    with pytest.raises(OrderRejected, match="second"):
        await second.ack(0, 1.0)


async def test_answers_that_nobody_waits_for_are_nothing() -> None:
    ranks = Ranks(1)
    issued = ranks.log.issue(Probe())
    ranks.log.settle(ack(7, 0))
    ranks.log.settle(ack(1, 5))
    assert not issued.complete
    ranks.log.settle(ack(1, 0))
    ranks.log.settle(ack(1, 0, "twice"))
    assert await issued.ack(0, 1.0) == Done()


async def test_an_order_that_is_overdue_names_who_is_to_blame() -> None:
    ranks = Ranks(2)
    issued = ranks.log.issue(Probe())
    ranks.log.settle(ack(1, 0))
    assert issued.missing == (1,)
    assert await issued.ack(0, 0.01) == Done()
    with pytest.raises(RankLost, match=r"rank 1 lost: no acknowledgement within 0\.01 s"):
        await issued.ack(1, 0.01)
    assert ranks.overdue == [1]


async def test_an_answer_that_comes_while_ranks_are_blamed_still_counts() -> None:
    ranks = Ranks(1)

    async def blame(issued: Issued) -> tuple[int, ...]:
        log.settle(ack(1, 0))
        return issued.missing

    log = OrderLog(dict(ranks.lines), blame)
    assert await log.issue(Probe()).ack(0, 0.01) == Done()


async def test_lost_rank_fails_what_is_open_and_what_comes() -> None:
    ranks = Ranks(2)
    before = ranks.log.issue(Probe())
    waiting = asyncio.create_task(before.ack(1, 60.0))
    await asyncio.sleep(0)
    ranks.log.lose(1, "gone")
    ranks.log.lose(1, "again")
    with pytest.raises(RankLost, match="gone"):
        await waiting
    after = ranks.log.issue(Probe())
    with pytest.raises(RankLost, match="gone"):
        await after.ack(1, 60.0)
    # The other rank still gets both orders, and answers them.
    assert len(ranks.lines[0].entries) == 2
    ranks.log.settle(ack(2, 0))
    assert await after.ack(0, 1.0) == Done()
    assert ranks.log.lost == {1: "gone"}


async def test_nothing_is_sent_once_all_ranks_are_lost() -> None:
    ranks = Ranks(1)
    ranks.log.lose(0, "gone")
    assert ranks.log.issue(Probe()).complete
    assert ranks.lines[0].entries == []


async def test_one_waiter_that_gives_up_leaves_the_others() -> None:
    ranks = Ranks(1)
    issued = ranks.log.issue(Probe())
    impatient = asyncio.create_task(issued.ack(0, 60.0))
    patient = asyncio.create_task(issued.ack(0, 60.0))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    ranks.log.settle(ack(1, 0))
    assert await patient == Done()
