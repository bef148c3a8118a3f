"""What an order would do now, in one sentence. For people; nothing is decided by it."""

from __future__ import annotations

from app.domain.commands import AbortRequests, Command, FlushCaches, Pause, Resume
from app.domain.facts import EngineFacts
from app.domain.kinds import Admission, NewRequests, PauseMode
from app.domain.operation import JsonObject


def effect_of(command: Command, facts: EngineFacts, load: JsonObject | None) -> str:
    """`load` None: the engine did not say how busy it is."""
    match command:
        case FlushCaches():
            return _flush(command, load)
        case Pause():
            return _pause(command, facts, load)
        case Resume():
            return _resume(facts)
        case AbortRequests():
            return _abort(command, facts, load)
        case _:
            return f"Carries out {command.kind.value}."


def _flush(command: FlushCaches, load: JsonObject | None) -> str:
    caches = ", ".join(cache.value for cache in command.caches)
    running = _number(load, "running_requests")
    kept = f"; blocks in use by {running} running requests are kept" if running else ""
    return f"Empties the caches {caches}{kept}."


def _pause(command: Pause, facts: EngineFacts, load: JsonObject | None) -> str:
    if facts.admission is Admission.PAUSED and facts.pause and facts.pause.mode is command.mode:
        return f"Changes nothing: the engine is paused in mode {command.mode.value} already."
    running, queued = _number(load, "running_requests"), _number(load, "queued_requests")
    work = f"{_said(running)} running and {_said(queued)} queued requests"
    first = {
        PauseMode.DRAIN: f"Lets {work} finish",
        PauseMode.ABORT: f"Ends {work}",
        PauseMode.KEEP: f"Freezes {work}",
    }[command.mode]
    then = "holds" if command.new_requests is NewRequests.HOLD else "refuses"
    return f"{first}, and {then} new ones until it is resumed."


def _resume(facts: EngineFacts) -> str:
    pause = facts.pause
    if pause is None:
        return f"Lifts pause {facts.pause_epoch}."
    return (
        f"Lifts pause {pause.epoch} ({pause.mode.value}): {pause.requests_kept} frozen requests "
        f"continue and {pause.requests_held} held ones are let in."
    )


def _abort(command: AbortRequests, facts: EngineFacts, load: JsonObject | None) -> str:
    if not command.all:
        return f"Ends {len(command.request_ids)} requests by id, those that are still there."
    running, queued = _number(load, "running_requests"), _number(load, "queued_requests")
    held = 0 if facts.pause is None else facts.pause.requests_held
    return f"Ends all requests: {_said(running)} running, {_said(queued)} queued, {held} held."


def _number(load: JsonObject | None, name: str) -> int | None:
    value = None if load is None else load.get(name)
    return value if isinstance(value, int) else None


def _said(number: int | None) -> str:
    return "an unknown number of" if number is None else str(number)
