"""Pauses that a client has not asked for: made by what takes one, and lifted with its end."""

from __future__ import annotations

from app.domain.kinds import Admission, WeightsState
from app.http.compat.giving import CompatCall
from app.http.compat.pauses import lift, own_pause

_ASKED_FOR = "/pause_generation"


async def open_again(call: CompatCall) -> None:
    """Lifts the pause in force when the engine has all that it serves with, if this caller made it
    by ordering something else. One that was asked for stays, and so does anybody else's."""
    facts = await call.facts()
    usable = facts.weights.state in (WeightsState.VALID, WeightsState.UNKNOWN)
    if facts.released or not usable or facts.admission is not Admission.PAUSED:
        return
    pause = await own_pause(call, facts)
    by = "" if pause is None else pause.reason or ""
    if by.startswith(f"{call.layer.product} endpoint ") and not by.endswith(_ASKED_FOR):
        await lift(call, facts, "resume")
