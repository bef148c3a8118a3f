"""Pauses: ordered, and lifted by whoever made them."""

from __future__ import annotations

from app.domain.capabilities import Capabilities
from app.domain.commands import Pause, Resume
from app.domain.errors import ResourcesReleased
from app.domain.facts import EXTERNAL, EngineFacts
from app.domain.kinds import (
    Admission,
    DrainRule,
    NewRequests,
    OperationKind,
    OperationState,
    PauseMode,
)
from app.domain.operation import Operation
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import NotYours, WouldHarm
from app.ledger.values import OperationFilter


def pause_of(call: CompatCall, mode: PauseMode) -> Pause:
    """Requests that come meanwhile wait, where the engine can have them wait."""
    holds = NewRequests.HOLD in call.can.new_requests
    return Pause(mode=mode, new_requests=NewRequests.HOLD if holds else NewRequests.REFUSE)


async def lift(call: CompatCall, facts: EngineFacts, part: str = "") -> None:
    """The pause in force, if it is this caller's last one. Raises NotYours."""
    resume = Resume(pause_epoch=max(facts.pause_epoch, 1))
    resume.check_state(facts)
    if await own_pause(call, facts) is None:
        raise NotYours("the pause in force is not one of yours, and stays")
    await call.give(resume, part)


async def resume(call: CompatCall, asleep: str) -> None:
    """Nothing is to be lifted where admission is open, which is no error. Open it may still be, or
    seem to be, while a pause is under way: that would hold after the answer was given. `asleep`:
    what is said where memory is released."""
    facts = await call.facts()
    if facts.released:
        raise ResourcesReleased(asleep)
    if facts.admission is not Admission.OPEN:
        await lift(call, facts)
    elif await call.busy_with(OperationKind.PAUSE):
        raise WouldHarm("a pause is under way, and would hold after this: wait for its end")


async def own_pause(call: CompatCall, facts: EngineFacts) -> Operation | None:
    """The order of the pause in force; None: there is none, or it is not this caller's."""
    by = None if facts.pause is None else facts.pause.by
    if by is None:
        return None
    known = await call.house.ledger.operations.get(by) if by != EXTERNAL else None
    found = known or await _from_before_a_restart(call, facts)
    return found if found is not None and found.actor == call.actor else None


async def _from_before_a_restart(call: CompatCall, facts: EngineFacts) -> Operation | None:
    """A sidecar that was started anew finds a pause and not whose it is. It is that of the latest
    order about pauses, anybody's, if that was such a pause, given to the process before this one;
    or nobody could lift it, and callers would be told that all is well."""
    about = frozenset({OperationKind.PAUSE, OperationKind.RESUME})
    page = await call.house.ledger.operations.page(
        OperationFilter(engine_id=call.engine.id, kinds=about), size=1
    )
    latest = page.items[0] if page.items else None
    if latest is None or facts.pause is None or latest.kind is not OperationKind.PAUSE:
        return None
    like_it = latest.request.get("mode") == facts.pause.mode
    done = latest.state is OperationState.SUCCEEDED
    return latest if like_it and done and latest.engine_instance_id != facts.instance_id else None


def drain_of(can: Capabilities) -> DrainRule:
    """Nothing runs any more when it counts; one that the engine knows has to be named."""
    return next((rule for rule in DrainRule if rule in can.drain_rules), DrainRule.WAIT)
