"""How an update of weights ends: by how far it has come, and by what is read. What is not proved to
be whole is inconsistent, and stays closed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import cast

from app.backends.port import OutcomeLost
from app.backends.vllm.errands import READ_S, Errand
from app.backends.vllm.kept import HeldPause, Kept
from app.backends.vllm.members import EngineDead
from app.backends.vllm.observing import (
    FINISHING,
    PAUSING,
    RESUMING,
    STARTING,
    TOUCHED,
    WITHDRAWING,
)
from app.backends.vllm.readings import EngineReading
from app.backends.vllm.refusals import dead, restarted, unknown
from app.backends.vllm.verdicts import Verdict, ended, restarts
from app.domain.commands import PauseAround, UpdateWeights
from app.domain.kinds import CachePolicy, Component, FailureEffect, PauseMode, WeightsState
from app.domain.operation import JsonValue, OperationError, OperationWarning
from app.domain.transitions import Cancelled, Completed, Fact, Failed, Warned
from app.rpc.vllm import control_pb2 as pb

FINISHING_AS, BEFORE = "finishing_as", "version_before"
"""What is added to the document of an order whose finish is under way."""

LEFT_PAUSED = OperationWarning(
    "PAUSE_NOT_LIFTED", "the engine stays paused until an update of its weights succeeds"
)


async def conclude_update(
    errand: Errand,
    command: UpdateWeights,
    error: OperationError | None,
    why: str = "",
    *,
    called_off: bool = False,
    finished: set[int] | None = None,
) -> AsyncGenerator[Fact, None]:
    """By how far it has come and by what is read. `error`: what is known to have gone wrong.
    `finished`: the places of members that have said that the update is finished. With none of these
    it is somebody else who comes to the order later. Raises OutcomeLost."""
    try:
        reading = await errand.read()
    except EngineDead:
        async for fact in errand.end(_spoilt(errand.kept, dead())):
            yield fact
        return
    if restarts(errand.kept, reading):
        async for fact in errand.end(_restarted(errand.kept, reading)):
            yield fact
        return
    way = errand.kept.under_way
    assert way is not None
    if way.step == FINISHING:
        version = str(way.request[FINISHING_AS])
        done = _finished(errand.kept, reading, version, finished)
        if len(done) == len(reading.members):
            await errand.write(_valid(errand.kept, command, version).at(RESUMING))
            async for fact in _resume(errand, command):
                yield fact
            return
        left = set(range(len(reading.members))) - done
        error = error or _unfinished(reading.ranks(left), len(reading.members), why)
    elif way.step == RESUMING:
        async for fact in _resume(errand, command):
            yield fact
        return
    if way.step in TOUCHED:
        yield Warned(warning=LEFT_PAUSED)
        spoilt = error or _broken_off(called_off, why)
        async for fact in errand.end(_spoilt(errand.kept, spoilt)):
            yield fact
        return
    async for fact in _untouched(errand, error, why, called_off=called_off):
        yield fact


def _unfinished(ranks: tuple[int, ...], members: int, why: str) -> OperationError:
    """`why`: what was said instead of it, where anything was."""
    message = "the engine did not finish the update"
    if members > 1:
        message = "the update is not finished on every member"
    return unknown("UPDATE_INCOMPLETE", f"{message}: {why}" if why else message, ranks)


def _finished(kept: Kept, reading: EngineReading, version: str, told: set[int] | None) -> set[int]:
    """The members whose update is finished. The version is set after that, so where it shows, and
    did not before, it is; and what has said so must show it too."""
    shown = {place for place, one in enumerate(reading.members) if one.version == version}
    if kept.version == version:
        return shown & (told or set())
    return shown


def _valid(kept: Kept, command: UpdateWeights, version: str) -> Kept:
    flush = command.cache_policy is CachePolicy.FLUSH
    target = Component.TARGET in command.components
    return replace(
        kept,
        weights=WeightsState.VALID if target else kept.weights,
        version=version,
        updates_since_flush=0 if flush else kept.updates_since_flush + 1,
        session_open=False,
    ).changed()


def _restarted(kept: Kept, reading: EngineReading) -> Verdict:
    """A new process has whole weights, those that it was started with. Not so a member that is the
    old one yet, nor a new one that the start may have gone to."""
    way = kept.under_way
    assert way is not None
    anew = restarts(kept, reading)
    error = restarted(reading.ranks(anew))
    some_stay = len(anew) < len(reading.members)
    if way.step == STARTING or (way.step in TOUCHED and some_stay):
        known = replace(
            kept,
            instance_ids=reading.instance_ids,
            pause_epoch=kept.pause_epoch + 1,
            release_epoch=kept.release_epoch + 1,
        )
        return _spoilt(known, error)
    return ended(kept, Failed(error=error))


def _spoilt(kept: Kept, error: OperationError) -> Verdict:
    error = replace(error, effect=FailureEffect.APPLIED_IN_PART)
    after = replace(kept, weights=WeightsState.INCONSISTENT, session_open=True).changed()
    return ended(after, Failed(error=error))


async def _resume(errand: Errand, command: UpdateWeights) -> AsyncGenerator[Fact, None]:
    """The new weights are in place. Lifts the pause that the order has made, and no other."""
    way = errand.kept.under_way
    assert way is not None
    if _own(errand.kept) and not await _lift(errand):
        if restarts(errand.kept, errand.reading):
            async for fact in errand.end(_restarted(errand.kept, errand.reading)):
                yield fact
            return
        yield Warned(
            warning=OperationWarning("PAUSE_NOT_LIFTED", "the engine is paused still: resume it")
        )
    after = errand.kept
    before = cast("str | None", way.request.get(BEFORE))
    names: list[JsonValue] = [component.value for component in command.components]
    result: dict[str, JsonValue] = {
        "changed": True,
        "weight_version": after.version,
        "previous_weight_version": before,
        "evidence": [],
        "confirmed": names,
        "unconfirmed": [],
        "flushed": [],
        "updates_since_flush": after.updates_since_flush,
        "switched": [],
    }
    end = Completed(result=result, revision=after.revision)
    async for fact in errand.end(ended(after, end)):
        yield fact


async def _untouched(
    errand: Errand, error: OperationError | None, why: str, *, called_off: bool
) -> AsyncGenerator[Fact, None]:
    """It ends before its start: the pause that it has made, or may have, is lifted again."""
    way = errand.kept.under_way
    assert way is not None
    mine = _own(errand.kept) or (
        way.step in (PAUSING, WITHDRAWING)
        and errand.kept.pause is None
        and any(member.paused for member in errand.reading.members)
    )
    effect = FailureEffect.NONE
    if mine:
        if await _lift(errand):
            effect = FailureEffect.ROLLED_BACK
        elif anew := restarts(errand.kept, errand.reading):
            error, called_off = restarted(errand.reading.ranks(anew)), False
            effect = FailureEffect.UNKNOWN
        else:
            effect = FailureEffect.APPLIED_IN_PART
            if errand.kept.pause is None:
                mode = _mode(errand)
                settled = mode is not PauseMode.DRAIN
                held = HeldPause(
                    mode=mode, by=errand.order.operation_id, since=errand.now(), settled=settled
                )
                await errand.write(errand.kept.paused(held))
    if called_off and effect is not FailureEffect.APPLIED_IN_PART:
        end: Cancelled | Failed = Cancelled(message="called off before any weight was touched")
    else:
        end = Failed(error=replace(error or _broken_off(called_off, why), effect=effect))
    async for fact in errand.end(ended(errand.kept, end)):
        yield fact


def _own(kept: Kept) -> bool:
    way = kept.under_way
    return way is not None and kept.pause is not None and kept.pause.by == way.operation_id


def _mode(errand: Errand) -> PauseMode:
    rule = cast("UpdateWeights", errand.order.command).admission
    return rule.mode if isinstance(rule, PauseAround) else PauseMode.KEEP


async def _lift(errand: Errand) -> bool:
    """Open admission; whether it is open, in the processes that were paused. Raises OutcomeLost:
    that can't be read."""
    if errand.reading.paused is not False:
        calls = await errand.calls()
        await calls.order("ResumeGeneration", pb.ResumeGenerationRequest(), READ_S)
        try:
            await errand.read()
        except EngineDead as gone:
            raise OutcomeLost("the engine died when it was resumed") from gone
    if errand.reading.paused is not False or restarts(errand.kept, errand.reading):
        return False
    if errand.kept.pause is not None:
        await errand.write(replace(errand.kept, pause=None).changed())
    return True


def lapsed(*, late: bool) -> OperationError:
    if late:
        message = "the session was not committed by the deadline"
        return OperationError("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", message)
    message = "nobody went on with the session for as long as its lease"
    return OperationError("ABORTED", "SESSION_LEASE_EXPIRED", message)


def miscounted(said: int, staged: int) -> OperationError:
    message = f"the commit counts {said} chunks, and {staged} were taken"
    return OperationError("FAILED_PRECONDITION", "CHUNK_COUNT_MISMATCH", message)


def _broken_off(called_off: bool, why: str) -> OperationError:
    if called_off:
        return OperationError("CANCELLED", "SESSION_ABORTED", "called off when it had begun")
    message = why or "who carried the update out is gone, and the pieces with it"
    return OperationError("UNKNOWN", "UPDATE_BROKEN_OFF", message)
