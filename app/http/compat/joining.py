"""Having an engine join a trainer's process group before any update: whoever opens the group waits
there for the engines."""

from __future__ import annotations

from app.domain.weight_sessions import NcclTransfer
from app.http.compat.giving import CompatCall
from app.http.records import caller_of
from app.http.refusals import Closing

_JOIN_S = 1800.0


async def join(call: CompatCall, transfer: NcclTransfer) -> bool:
    """Whether the engine is in it now; False: it joins when an update begins. Of the same call
    twice at once the second waits for the first. Raises Closing, and what `Groups.join` raises."""
    transfer.check_ranks(call.can.world_size)
    caller = caller_of(call.request, call.who, call.note)
    engine_id, groups = call.engine.id, call.house.groups
    joining = call.house.announcements.joined(
        engine_id, call.actor, transfer, lambda: groups.join(engine_id, transfer, caller, _JOIN_S)
    )
    with call.house.waiting.one_more(call.request):
        joined = await call.house.closing.unless(joining)
    if joined is None:
        raise Closing
    return joined
