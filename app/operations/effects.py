"""What an order would do now, in one sentence. For people; nothing is decided by it."""

from __future__ import annotations

from collections.abc import Collection

from app.domain.commands import (
    AbortRequests,
    Command,
    FlushCaches,
    LoadLora,
    Pause,
    PauseAround,
    ReconfigureServing,
    ReleaseResources,
    RestoreResources,
    Resume,
    SetWeightVersion,
    Shutdown,
    StartProfile,
    UnloadLora,
    UpdateWeights,
)
from app.domain.facts import EngineFacts
from app.domain.kinds import (
    Admission,
    CachePolicy,
    ContentPolicy,
    DrainRule,
    NewRequests,
    PauseMode,
    ResourceKind,
)
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
        case ReleaseResources():
            return _release(command, facts, load)
        case RestoreResources():
            return _restore(command, facts)
        case ReconfigureServing():
            return _reconfigure(command, facts, load)
        case StartProfile():
            return _record(command)
        case LoadLora():
            return f"Loads the adapter {command.name} on all ranks."
        case UnloadLora():
            return f"Unloads the adapter {command.name} from all ranks, unless requests use it."
        case SetWeightVersion():
            before = facts.weights.version or "undeclared"
            return f"Calls the weights {command.weight_version}, which are {before} now."
        case UpdateWeights():
            return _update(command, facts, load)
        case Shutdown():
            running = _number(load, "running_requests")
            return f"Ends the engine, and {_said(running)} running requests with it."
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
    mode = "another client's" if pause.mode is None else pause.mode.value
    return (
        f"Lifts pause {pause.epoch} ({mode}): {pause.requests_kept} frozen requests "
        f"continue and {pause.requests_held} held ones are let in."
    )


def _abort(command: AbortRequests, facts: EngineFacts, load: JsonObject | None) -> str:
    if not command.all:
        return f"Ends {len(command.request_ids)} requests by id, those that are still there."
    running, queued = _number(load, "running_requests"), _number(load, "queued_requests")
    held = 0 if facts.pause is None else facts.pause.requests_held
    return f"Ends all requests: {_said(running)} running, {_said(queued)} queued, {held} held."


def _release(command: ReleaseResources, facts: EngineFacts, load: JsonObject | None) -> str:
    fresh = [kind for kind in command.resources if kind not in facts.released]
    # Whether the host still keeps the content of what is released, the facts do not say.
    discard = command.content is ContentPolicy.DISCARD
    lost = discard and ResourceKind.WEIGHTS in command.resources
    forever = "; only an update brings weights back" if lost else ""
    named = _names(command.resources)
    if not fresh and discard:
        return f"Drops what the host keeps of {named}, if it keeps any{forever}."
    if not fresh:
        return f"Changes nothing: {named} {_are(command.resources)} released."
    if discard:
        then = f"gives back the memory of {named}, its content dropped{forever}"
    else:
        then = f"gives back the memory of {_names(fresh)}, its content kept on the host"
    return f"{_closing(command.drain, facts, load)}, then {then}."


def _closing(drain: DrainRule, facts: EngineFacts, load: JsonObject | None) -> str:
    if facts.admission is Admission.PAUSED:
        return "Leaves admission closed as it is"
    running = _said(_number(load, "running_requests"))
    return {
        DrainRule.WAIT: f"Closes admission and lets {running} running requests finish",
        DrainRule.ABORT: f"Closes admission and ends {running} running requests",
        DrainRule.REFUSE: f"Closes admission unless requests are running ({running} now)",
    }[drain]


def _restore(command: RestoreResources, facts: EngineFacts) -> str:
    wanted = [kind for kind in command.resources if kind in facts.released]
    if not wanted:
        return f"Changes nothing: {_names(command.resources)} {_are(command.resources)} in place."
    left = facts.released - set(wanted)
    rest = f"; {_names(left)} {_are(left)} released still" if left else ""
    return f"Takes memory for {_names(wanted)} again{rest}. Admission is not opened."


def _update(command: UpdateWeights, facts: EngineFacts, load: JsonObject | None) -> str:
    version = facts.weights.version or "undeclared ones"
    first = f"Prepares {command.weight_version} beside {version}"
    kept = command.cache_policy is CachePolicy.KEEP
    caches = "keeps what they have cached" if kept else "flushes what they have cached"
    rule = command.admission
    if not isinstance(rule, PauseAround) or facts.admission is Admission.PAUSED:
        return f"{first}, exchanges them under the pause in force, and {caches}."
    running = _said(_number(load, "running_requests"))
    then = {
        PauseMode.DRAIN: f"lets {running} running requests finish",
        PauseMode.ABORT: f"ends {running} running requests",
        PauseMode.KEEP: f"freezes {running} running requests",
    }[rule.mode]
    return f"{first}, {then}, exchanges them on all ranks, {caches}, and serves again."


def _reconfigure(command: ReconfigureServing, facts: EngineFacts, load: JsonObject | None) -> str:
    targets = ", ".join(f"{name.value} {wanted}" for name, wanted in command.targets().items())
    closing = _closing(command.drain, facts, load)
    again = "" if facts.admission is Admission.PAUSED else ", and serves again"
    return f"{closing}, then takes on {targets}{again}."


def _record(command: StartProfile) -> str:
    bound = "until it is stopped"
    if command.steps is not None:
        bound = f"of {_steps(command.steps)}"
    elif command.duration_ms is not None:
        bound = f"of {command.duration_ms} ms"
    return f"Records a {command.profiler.value} profile {bound} beside other work."


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def _names(kinds: Collection[ResourceKind]) -> str:
    return ", ".join(sorted(kind.value for kind in kinds))


def _are(kinds: Collection[ResourceKind]) -> str:
    # "weights" is a plural by itself.
    return "is" if len(kinds) == 1 and ResourceKind.KV_CACHE in kinds else "are"


def _number(load: JsonObject | None, name: str) -> int | None:
    value = None if load is None else load.get(name)
    return value if isinstance(value, int) else None


def _said(number: int | None) -> str:
    return "an unknown number of" if number is None else str(number)
