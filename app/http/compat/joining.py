"""Having an engine join a trainer's process group before any update: whoever opens the group waits
there for the engines."""

from __future__ import annotations

from app.domain.weight_sessions import NcclTransfer
from app.http.compat.giving import CompatCall
from app.http.records import caller_of
from app.http.refusals import Closing

_JOIN_S = 1800.0


async def join(call: CompatCall, transfer: NcclTransfer) -> None:
    """Where engines join by a call of its own. Of the same call twice the second waits for the
    first. Raises Closing, and what `Groups.join` raises."""
    transfer.check_ranks(call.can.world_size)
    caller = caller_of(call.request, call.who, call.note)
    engine_id, groups = call.engine.id, call.house.groups
    joining = call.house.announcements.joined(
        engine_id, call.actor, transfer, lambda: groups.join(engine_id, transfer, caller, _JOIN_S)
    )
    with call.house.waiting.one_more(call.request):
        if await call.house.closing.unless(joining) is None:
            raise Closing
