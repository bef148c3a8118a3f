"""Ending requests, and saying no more about it than is known.

SGLang answers with status 200 and nothing, whatever it did. Its scheduler ends every request whose
id begins with the one that is sent, so that the sidecar's own are all of one length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from app.domain.kinds import AbortOutcome
from app.enginekit.runtime import AbortTally, RuntimeFault
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.streams import Streams, outcomes_of

_LOOK_S = 0.1
_LOOKS = 50


async def abort(
    engine: SglangEngine, streams: Streams, request_ids: Iterable[str], message: str
) -> AbortTally:
    """Raises RuntimeFault."""

    async def others(unknown: list[str]) -> AbortOutcome:
        # Nothing but what came through here: then it cannot have them. A pause holds others back
        # where they are not counted.
        alone = (await engine.loads()).in_flight <= len(streams.running)
        if alone and engine.belief.paused is None:
            return AbortOutcome.NOT_FOUND
        for name in unknown:
            await engine.post("/abort_request", body={"rid": name})
        return AbortOutcome.UNVERIFIED

    return AbortTally(await streams.abort(request_ids, message, others))


async def abort_all(engine: SglangEngine, streams: Streams, message: str) -> AbortTally:
    """Counted by what the engine had before and has not afterwards. What is frozen in place is put
    back into the queue for it: there it would end with its next step alone. Raises RuntimeFault."""
    mine = streams.running
    before = (await engine.loads()).in_flight
    for stream in mine:
        stream.why = stream.why or message
    await engine.put_back()
    await engine.post("/abort_request", body={"abort_all": True})
    await streams.end(mine, message)
    outcomes = outcomes_of(mine)
    # Their ids are not told, so they get numbers.
    others = max(0, before - len(mine))
    ended = await _emptied(engine) if others else AbortOutcome.ABORTED
    return AbortTally(outcomes | {f"other {number}": ended for number in range(others)})


async def _emptied(engine: SglangEngine) -> AbortOutcome:
    """A scheduler that is held tells nothing new."""
    if engine.held:
        return AbortOutcome.UNVERIFIED
    for _ in range(_LOOKS):
        try:
            if not (await engine.loads()).in_flight:
                return AbortOutcome.ABORTED
        except RuntimeFault:
            return AbortOutcome.UNVERIFIED
        if engine.belief.paused is None:
            return AbortOutcome.ABORTED  # new ones come as they like: those from before were told
        await asyncio.sleep(_LOOK_S)
    return AbortOutcome.FAILED
