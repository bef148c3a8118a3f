"""Ending requests, and saying no more about it than is known.

vLLM answers with the number of ids that it was sent. An id that it does not have counts like one
that it ended, and the id that a client of completions sees, `cmpl-X`, is none that it has: those
are `cmpl-X-0`, `cmpl-X-1` and so on, one for each prompt.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from app.domain.kinds import AbortOutcome
from app.enginekit.runtime import AbortTally, RuntimeFault
from app.sidecars.answers import field_of
from app.sidecars.faults import told
from app.sidecars.streams import Streams, outcomes_of
from app.sidecars.vllm.engine import VllmEngine

_NUMBERED = re.compile(r".-\d+$")
_LOOK_S = 0.05
_LOOKS = 40


def ids_for(request_id: str) -> tuple[str, ...]:
    """What the engine may call the request of that id."""
    if request_id.startswith("cmpl-") and not _NUMBERED.search(request_id):
        return (request_id, f"{request_id}-0")
    return (request_id,)


async def abort(
    engine: VllmEngine, streams: Streams, request_ids: Iterable[str], message: str
) -> AbortTally:
    """Raises RuntimeFault."""

    async def others(unknown: list[str]) -> AbortOutcome:
        # Nothing but what came through here: then it cannot have them. A paused engine does not
        # count what has come since.
        in_flight = (await engine.metrics()).in_flight
        alone = in_flight is not None and in_flight <= len(streams.running)
        if alone and engine.belief.paused is None:
            return AbortOutcome.NOT_FOUND
        ids = [one for name in unknown for one in ids_for(name)]
        await engine.post("/abort_requests", body={"request_ids": ids})
        return AbortOutcome.UNVERIFIED

    return AbortTally(await streams.abort(request_ids, message, others))


async def abort_all(engine: VllmEngine, streams: Streams, message: str) -> AbortTally:
    """Counted by what the engine had before and has not afterwards. Raises RuntimeFault."""
    mine = streams.running
    before = (await engine.metrics()).in_flight
    for stream in mine:
        stream.why = stream.why or message
    answer = await engine.post("/abort_requests", body={"request_ids": []})
    with told():
        sent = int(field_of(answer, "aborted", int))
    await streams.end(mine, message)
    outcomes = outcomes_of(mine)
    # Their ids are not told, so they get numbers.
    others = max(0, (before or 0) - len(mine))
    ended = AbortOutcome.ABORTED if await _emptied(engine) else AbortOutcome.FAILED
    outcomes |= {f"other {number}": ended for number in range(others)}
    if before is None or engine.belief.paused is not None:
        # What has come since the pause is ended too, and counted nowhere.
        unsure = max(0, sent - len(outcomes))
        outcomes |= {f"waiting {n}": AbortOutcome.UNVERIFIED for n in range(unsure)}
    return AbortTally(outcomes)


async def _emptied(engine: VllmEngine) -> bool:
    for _ in range(_LOOKS):
        try:
            if not (await engine.metrics()).in_flight:
                return True
        except RuntimeFault:
            return False
        if engine.belief.paused is None:
            return True  # new ones come as they like: those from before were all told
        await asyncio.sleep(_LOOK_S)
    return False
