"""Waking a sleeping engine, resource by resource.

With the last one vLLM opens admission by itself, and no call keeps it from that. So the last one is
woken only where weights are valid, and the engine is paused again at once: requests that waited may
have begun meanwhile, and are frozen rather than ended.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import datetime

from app.backends.port import EngineRefused
from app.backends.vllm.aims import released
from app.backends.vllm.errands import READ_S, Errand
from app.backends.vllm.kept import HeldPause, Kept
from app.backends.vllm.members import EngineDead
from app.backends.vllm.observing import WAKING
from app.backends.vllm.readings import EngineReading
from app.backends.vllm.refusals import dead, restarted, unknown
from app.backends.vllm.statuses import Done, Lost, Refused, Said
from app.backends.vllm.verdicts import Verdict, ended, first_error, restarts
from app.domain.commands import RestoreResources
from app.domain.kinds import FailureEffect, PauseMode, ResourceKind
from app.domain.operation import OperationWarning
from app.domain.transitions import Completed, Fact, Failed, Warned
from app.rpc.vllm import control_pb2 as pb

OPENED = OperationWarning(
    "ADMISSION_OPENED_BRIEFLY",
    "with its last resource the engine let requests in, until it was paused again",
)
_TRIES = 3
_PAUSE = pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP, clear_cache=False)


async def restore(errand: Errand, command: RestoreResources) -> AsyncGenerator[Fact, None]:
    """As `EngineBackend.carry_out` promises."""
    errand.judge()
    todo = _todo(errand.kept, command)
    if not todo:
        if errand.kept.under_way is not None:
            await errand.write(errand.kept.over(None))
        result = {"changed": False, **released(errand.kept)}
        yield Completed(result=result, revision=errand.kept.revision)
        return
    await errand.begin(WAKING)
    calls = await errand.first_calls()
    request = pb.WakeUpRequest(tags=sorted(kind.value for kind in todo))
    answers = await calls.order("WakeUp", request, errand.longest_s)
    if all(isinstance(one, Refused) for one in answers.values()):
        await errand.give_up(EngineRefused(first_error(answers)))
    if todo == errand.kept.released or errand.kept.sleep_doubt:
        # At once, on the lines that are up: each moment more lets requests in. What has not
        # answered may be another process by now, and is looked at first.
        awake = [place for place, one in answers.items() if isinstance(one, Done)]
        await calls.order("PauseGeneration", _PAUSE, READ_S, awake)
        yield Warned(warning=OPENED)
    async for fact in conclude_restore(errand, command, answers):
        yield fact


async def conclude_restore(
    errand: Errand, command: RestoreResources, answers: dict[int, Said] | None = None
) -> AsyncGenerator[Fact, None]:
    """By what is read; and what is found open is paused again first. `answers` None: nobody heard
    them. Raises OutcomeLost."""
    todo = _todo(errand.kept, command)
    try:
        reading = await errand.read()
        awake = _awake(reading)
        for attempt in range(_TRIES):
            if reading.paused is True or restarts(errand.kept, reading):
                break
            calls = await errand.calls()
            await calls.order("PauseGeneration", _PAUSE, READ_S)
            if answers is None and not attempt:
                yield Warned(warning=OPENED)
            reading = await errand.read()
    except EngineDead:
        async for fact in errand.end(ended(errand.kept, Failed(error=dead()))):
            yield fact
        return
    found = _verdict(errand.kept, todo, reading, awake, answers, errand.now())
    async for fact in errand.end(found):
        yield fact


def _verdict(
    kept: Kept,
    todo: frozenset[ResourceKind],
    reading: EngineReading,
    awake: set[int],
    answers: dict[int, Said] | None,
    now: datetime,
) -> Verdict:
    """`awake`: the places of members that were seen open, which shows that nothing of them slept
    any more."""
    anew = restarts(kept, reading)
    if anew:
        return ended(kept, Failed(error=restarted(reading.ranks(anew))))
    heard = {place for place, one in (answers or {}).items() if isinstance(one, Done)}
    every = set(range(len(reading.members)))
    unsure = every - heard - awake
    if unsure:
        # All is taken as asleep still, with a doubt.
        failing = {place: one for place, one in (answers or {}).items() if place in unsure}
        told = [one for one in failing.values() if not isinstance(one, Lost)]
        message = "whether the resources are there again is not known"
        error = unknown(
            "RESTORE_UNCONFIRMED", message, reading.ranks(unsure), in_part=bool(heard | awake)
        )
        if told and len(told) == len(failing):
            error = replace(
                first_error(failing),
                ranks=reading.ranks(unsure),
                effect=FailureEffect.APPLIED_IN_PART if heard | awake else FailureEffect.UNKNOWN,
            )
        return ended(replace(kept, sleep_doubt=True).changed(), Failed(error=error))
    gone = kept.released if awake == every else todo
    after = replace(kept, released=kept.released - gone).changed()
    if not after.released:
        after = replace(after, sleep_doubt=False)
    elif not kept.sleep_doubt:
        return _completed(after)
    if reading.paused is not True:
        message = "the engine is awake, and could not be paused again: admission is open"
        places = {place for place, member in enumerate(reading.members) if not member.paused}
        error = unknown("ADMISSION_LEFT_OPEN", message, reading.ranks(places), in_part=True)
        return ended(after, Failed(error=error))
    if after.pause is None:  # somebody had opened it in its sleep: this pause is the order's own
        assert kept.under_way is not None
        own = HeldPause(mode=PauseMode.KEEP, by=kept.under_way.operation_id, since=now)
        return _completed(replace(after, pause=own, pause_epoch=after.pause_epoch + 1))
    frozen = replace(after.pause, mode=PauseMode.KEEP, settled=True)
    return _completed(replace(after, pause=frozen))


def _completed(after: Kept) -> Verdict:
    return ended(
        after, Completed(result={"changed": True, **released(after)}, revision=after.revision)
    )


def _todo(kept: Kept, command: RestoreResources) -> frozenset[ResourceKind]:
    return kept.released & frozenset(command.resources)


def _awake(reading: EngineReading) -> set[int]:
    return {
        place
        for place, member in enumerate(reading.members)
        if member.paused is False and member.sleeping is False
    }
