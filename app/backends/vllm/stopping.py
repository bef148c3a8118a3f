"""Ending the engine. vLLM says yes at once and closes its listener; how its requests fare after
that it does not say, so the end is told when nothing listens any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from app.backends.port import EngineRefused, EngineSilent, OutcomeLost
from app.backends.vllm.errands import READ_S, Errand
from app.backends.vllm.observing import SENDING
from app.backends.vllm.refusals import unknown
from app.backends.vllm.statuses import Broke, Refused
from app.backends.vllm.verdicts import ended, first_error, restarts
from app.domain.operation import Progress
from app.domain.transitions import Completed, Fact, Failed, Progressed
from app.rpc.vllm import control_pb2 as pb

_LOOK_S = 0.5


async def shut_down(errand: Errand) -> AsyncGenerator[Fact, None]:
    """As `EngineBackend.carry_out` promises."""
    errand.judge()
    await errand.begin(SENDING)
    calls = await errand.first_calls()
    answers = await calls.order("Shutdown", pb.ShutdownRequest(), READ_S)
    if all(isinstance(one, Refused) for one in answers.values()):
        await errand.give_up(EngineRefused(first_error(answers)))
    # A connection that breaks over it is what vLLM announces: whether it is gone is looked at.
    failing = {place for place, one in answers.items() if isinstance(one, Refused | Broke)}
    if failing:
        error = first_error({place: answers[place] for place in failing})
        said = unknown(error.reason, error.message, errand.reading.ranks(failing), in_part=True)
        async for fact in errand.end(ended(errand.kept, Failed(error=said))):
            yield fact
        return
    yield Progressed(progress=Progress("shutting_down"))
    async for fact in until_gone(errand):
        yield fact


async def until_gone(errand: Errand) -> AsyncGenerator[Fact, None]:
    """Also for who comes to it later. Raises OutcomeLost: it is there still."""
    while True:
        try:
            gone = await errand.crew.gone(READ_S)
        except EngineSilent as silent:
            raise OutcomeLost("whether the engine is gone can't be told") from silent
        if all(gone):
            end = Completed(result={"changed": True}, revision=errand.kept.revision)
            async for fact in errand.end(ended(errand.kept, end)):
                yield fact
            return
        if not any(gone) and await _anew(errand):
            # It was ended, and somebody has started it again.
            end = Completed(result={"changed": True}, revision=errand.kept.revision)
            async for fact in errand.end(ended(errand.kept, end)):
                yield fact
            return
        if errand.left_s <= 0:
            raise OutcomeLost("the engine was told to end, and answers still")
        await asyncio.sleep(_LOOK_S)


async def _anew(errand: Errand) -> bool:
    try:
        reading = await errand.crew.read(READ_S)
    except EngineSilent:
        return False
    return len(restarts(errand.kept, reading)) == len(reading.members)
