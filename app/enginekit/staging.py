"""The pieces of a weight session, on their way to the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from app.domain.command import Command
from app.domain.commands import UpdateWeights
from app.domain.kinds import FailureEffect
from app.domain.operation import OperationError
from app.domain.ranks import RankState
from app.domain.transitions import Progressed
from app.domain.weight_sessions import Chunk
from app.enginekit.errands import Errand
from app.enginekit.phases import CancelAsked, OnEachRank, OrderFailed, Step
from app.enginekit.refusals import StoreUnavailable
from app.enginekit.runtime import Order, WeightSessionRuntime
from app.enginekit.sessions import OpenSession

# How soon a rank's death ends a session that waits for its caller; it is observed about as often.
_LOOK_S = 0.5


async def stage_pieces(errand: Errand, on_each_rank: OnEachRank) -> Command:
    """Until the caller has sent COMMIT and all its pieces are staged on every rank. What is then
    to be committed: the order, with the version that COMMIT names if it names one.

    Raises OrderFailed, CancelAsked, DeadlinePassed; none of the live weights is touched.
    """
    session, runtime = errand.session, errand.runtime
    assert session is not None
    assert isinstance(runtime, WeightSessionRuntime)  # else it is not offered
    unwell = _unwell(errand)
    try:
        await on_each_rank(runtime.open_session)
        await _tell(errand, session, "open")
        while True:
            chunk = await errand.interrupts.guard(session.piece(_LOOK_S), cancellable=True)
            if chunk is not None:
                await on_each_rank(_staging(runtime, chunk))
                session.staged += 1
                await _tell(errand, session, "staged")
            elif session.commit is not None:
                break
            elif lost := _unwell(errand) - unwell:
                raise OrderFailed(_lost(lost))
    except CancelAsked:
        if session.lapsed:
            raise OrderFailed(_LAPSED) from None
        raise
    if session.commit.chunks != session.accepted:
        raise OrderFailed(_miscounted(session.commit.chunks, session.accepted))
    return named_by(session, cast("UpdateWeights", errand.command))


def named_by(session: OpenSession | None, command: UpdateWeights) -> UpdateWeights:
    """The update with the version that the COMMIT of its session names."""
    commit = None if session is None else session.commit
    if commit is None or commit.weight_version is None:
        return command
    return replace(command, weight_version=commit.weight_version)


def _staging(runtime: WeightSessionRuntime, chunk: Chunk) -> Step:
    async def stage(order: Order, rank: int) -> None:
        await runtime.stage_chunk(order, rank, chunk)

    return stage


async def _tell(errand: Errand, session: OpenSession, phase: str) -> None:
    try:
        await errand.record(Progressed(progress=session.progress(phase)))
    except StoreUnavailable:
        # What is staged is staged; the next one tells of this one too.
        return


def _unwell(errand: Errand) -> set[int]:
    """As the engine was last observed, about a second ago."""
    return {one.rank for one in errand.state.ranks if one.state is RankState.FAILED}


_LAPSED = OperationError(
    code="ABORTED",
    reason="SESSION_LEASE_EXPIRED",
    message="the session was not heard of for as long as its lease",
    retryable=True,
    effect=FailureEffect.NONE,
)


def _miscounted(sent: int, accepted: int) -> OperationError:
    return OperationError(
        code="ABORTED",
        reason="CHUNK_COUNT_MISMATCH",
        message=f"the caller has sent {sent} chunks, and {accepted} were accepted",
        effect=FailureEffect.NONE,
    )


def _lost(ranks: set[int]) -> OperationError:
    return OperationError(
        code="UNAVAILABLE",
        reason="RANK_LOST",
        message=f"rank {', '.join(map(str, sorted(ranks)))} was lost during the session",
        retryable=True,
        ranks=tuple(sorted(ranks)),
        effect=FailureEffect.NONE,
    )
