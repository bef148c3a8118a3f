"""What readiness and the figures are made of."""

from __future__ import annotations

from typing import ClassVar

from app.domain.errors import ChadburnError, Unavailable
from app.domain.selectors import Sight
from app.http.refusals import Closing, EdgeRefusal
from app.http.rooms import Rooms
from app.ledger.values import EngineFilter

_ENGINES_AT_MOST = 1000


class NotReady(EdgeRefusal, Unavailable):
    reason = "NOT_READY"
    status: ClassVar[int] = 503

    def __init__(self) -> None:
        super().__init__("The ledger cannot be used at present.", retry_after_s=2)


async def refuse_unless_ready(rooms: Rooms) -> None:
    """Raises NotReady or Closing."""
    if rooms.closing.is_set():
        raise Closing
    try:
        await rooms.ledger.check()
    except ChadburnError as error:
        raise NotReady from error


def is_degraded(rooms: Rooms) -> bool:
    """Tokens of some issuer can't be judged, or the policy file or a list of engines as it is now
    was refused."""
    followed = rooms.policy_ok() and rooms.finding_ok()
    return not followed or not all(state.ok for state in rooms.issuer_states())


async def exposition(rooms: Rooms, sight: Sight) -> bytes:
    """All figures, with engines and open operations as of now: those of the sight."""
    if not sight.unlimited:
        wanted = EngineFilter(sight=sight)
        seen = (await rooms.ledger.engines.page(wanted, None, _ENGINES_AT_MOST)).items
        ids = {engine.id for engine in seen}
        operations = await rooms.ledger.operations.open_ones()
        return rooms.metrics.render_for(seen, [o for o in operations if o.engine_id in ids])
    await look_at_engines(rooms)
    return rooms.metrics.render()


async def look_at_engines(rooms: Rooms) -> None:
    """Bring the figures of engines and open operations up to date."""
    engines = await rooms.ledger.engines.page(EngineFilter(), None, _ENGINES_AT_MOST)
    rooms.metrics.saw(engines.items, await rooms.ledger.operations.open_ones())
