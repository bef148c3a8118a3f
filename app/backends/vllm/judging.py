"""Whether an order may be sent to an engine in this state. vLLM itself takes nearly everything,
also what kills it; here it is refused. Pure."""

from __future__ import annotations

from datetime import datetime

from app.backends.port import Order
from app.backends.vllm.aims import Aim, LoraAim, PauseAim, SleepAim, VersionAim
from app.backends.vllm.kept import Kept
from app.backends.vllm.observing import facts_of
from app.backends.vllm.readings import BOTH, EngineReading, refuses_new_requests
from app.backends.vllm.refusals import refused, refused_by
from app.domain.commands import (
    Command,
    LoadLora,
    Pause,
    PauseAround,
    ReleaseResources,
    RestoreResources,
    Resume,
    UpdateWeights,
)
from app.domain.errors import ChadburnError, RequestsFrozen, ResourcesReleased, WeightsNotValid
from app.domain.facts import WeightsFact
from app.domain.kinds import (
    Admission,
    ContentPolicy,
    DrainRule,
    NewRequests,
    PauseMode,
    ResourceKind,
    WeightsState,
)
from app.domain.operation import OperationWarning
from app.domain.weight_sessions import SessionWeights
from app.domain.weight_sources import DiskWeights

_SLEEP_UNKNOWN = (
    "another client has paused the engine, and whether it sleeps as well can't be told: release "
    "its resources and restore them"
)


def judge(order: Order, kept: Kept, reading: EngineReading, now: datetime) -> None:
    """`kept` is up to date with `reading`. Raises EngineRefused."""
    command = order.command
    if order.expected_revision is not None and order.expected_revision != kept.revision:
        message = "the engine is at another revision than the expected one"
        raise refused("ABORTED", "REVISION_MISMATCH", message)
    if command.kind.exclusive:
        try:
            command.check_state(facts_of(kept, reading, now))
        except ChadburnError as error:
            raise refused_by(error) from error
    match command:
        case Pause():
            _pause(command, kept, reading)
        case Resume():
            _resume(kept, reading)
        case ReleaseResources():
            _release(command, kept)
        case RestoreResources():
            _restore(command, kept)
        case UpdateWeights():
            _update(command, kept, reading)
        case LoadLora():
            _load(command, kept, reading)
        case _:
            pass


def _pause(command: Pause, kept: Kept, reading: EngineReading) -> None:
    _check_new_requests(command.mode, command.new_requests, command.hold_limit_ms, reading)
    if kept.released:
        raise refused_by(ResourcesReleased("the engine sleeps: restore what is released first"))
    if command.mode is PauseMode.DRAIN and _may_be_frozen(kept):
        # vLLM says at once that it has drained them.
        message = "requests may be frozen, and can't finish: resume, or pause with abort"
        raise refused_by(RequestsFrozen(message))


def _may_be_frozen(kept: Kept) -> bool:
    return kept.pause is not None and kept.pause.mode in (None, PauseMode.KEEP)


def _check_new_requests(
    mode: PauseMode, rule: NewRequests, hold_limit_ms: int | None, reading: EngineReading
) -> None:
    if hold_limit_ms is not None:
        message = "vLLM holds new requests for as long as the pause lasts"
        raise refused("UNIMPLEMENTED", "UNSUPPORTED_OPERATION", message)
    if rule is NewRequests.REFUSE and not refuses_new_requests(reading, mode):
        message = "this vLLM lets new requests wait while it is paused in that mode"
        raise refused("UNIMPLEMENTED", "UNSUPPORTED_OPERATION", message)


def _resume(kept: Kept, reading: EngineReading) -> None:
    if kept.weights not in (WeightsState.VALID, WeightsState.UNKNOWN):
        raise refused_by(WeightsNotValid(WeightsFact(state=kept.weights).shortfall))
    if kept.sleep_doubt and reading.sleeping is not False:
        raise refused("FAILED_PRECONDITION", "SLEEP_STATE_UNKNOWN", _SLEEP_UNKNOWN)


def _release(command: ReleaseResources, kept: Kept) -> None:
    if kept.released and kept.sleep_doubt:
        return  # it makes sure
    if kept.released and kept.released != BOTH:
        message = "the engine is half awake: restore the rest first"
        raise refused("FAILED_PRECONDITION", "RESOURCES_RELEASED", message)
    discard = command.content is ContentPolicy.DISCARD
    if kept.released and discard and kept.weights is not WeightsState.MISSING:
        # vLLM would answer that it sleeps at level 2, and go on keeping the content.
        message = "released with its content already: restore it first"
        raise refused("FAILED_PRECONDITION", "RESOURCES_RELEASED", message)
    if not kept.released and command.drain is not DrainRule.ABORT and _may_be_frozen(kept):
        message = "requests may be frozen, and a sleeping engine keeps nothing of them"
        raise refused_by(RequestsFrozen(message))


def _restore(command: RestoreResources, kept: Kept) -> None:
    rest = kept.released - set(command.resources)
    if kept.released and kept.sleep_doubt and kept.weights is not WeightsState.VALID:
        # What is awake already, vLLM opens when it is woken once more.
        message = "what is released may be awake: release it once more to make sure"
        raise refused("FAILED_PRECONDITION", "SLEEP_STATE_UNKNOWN", message)
    if kept.released and not rest and kept.weights is not WeightsState.VALID:
        # With its last resource vLLM opens admission by itself.
        message = f"{WeightsFact(state=kept.weights).shortfall}, before the last resource"
        raise refused_by(WeightsNotValid(message))


def _update(command: UpdateWeights, kept: Kept, reading: EngineReading) -> None:
    if not isinstance(command.source, SessionWeights | DiskWeights):
        raise refused("UNIMPLEMENTED", "UNSUPPORTED_OPERATION", "not a source of this engine")
    if len(command.components) != 1:
        message = "vLLM updates the model or its draft, one in each update"
        raise refused("UNIMPLEMENTED", "UNSUPPORTED_OPERATION", message)
    if isinstance(command.source, DiskWeights) and not command.source.path.startswith("/"):
        raise refused("INVALID_ARGUMENT", "INVALID_ARGUMENT", "the path must be absolute")
    if ResourceKind.WEIGHTS in kept.released:
        raise refused_by(ResourcesReleased("restore what is released first: weights"))
    if kept.sleep_doubt and reading.sleeping is not False:
        raise refused("FAILED_PRECONDITION", "SLEEP_STATE_UNKNOWN", _SLEEP_UNKNOWN)
    if kept.pause is not None and not kept.pause.settled:
        message = "requests may be at work still: pause again, and wait for its end"
        raise refused("FAILED_PRECONDITION", "DRAIN_UNCONFIRMED", message)
    rule = command.admission
    if isinstance(rule, PauseAround):
        _check_new_requests(rule.mode, rule.new_requests, rule.hold_limit_ms, reading)
    if facts_admission(reading) is Admission.UNKNOWN:
        message = "not every member is paused: pause the engine first"
        raise refused("FAILED_PRECONDITION", "MEMBERS_DIFFER", message)


def facts_admission(reading: EngineReading) -> Admission:
    if reading.paused is None:
        return Admission.UNKNOWN
    return Admission.PAUSED if reading.paused else Admission.OPEN


def _load(command: LoadLora, kept: Kept, reading: EngineReading) -> None:
    if command.id:
        message = "vLLM numbers adapters itself"
        raise refused("UNIMPLEMENTED", "UNSUPPORTED_OPERATION", message)
    room = min(member.server.max_loras for member in reading.members)
    known = {lora.name for lora in kept.loras}
    if room and command.name not in known and len(known) >= room:
        # One more would push another one out, which the list would go on naming.
        message = f"{room} adapters are loaded, and no more fit: unload one"
        raise refused("RESOURCE_EXHAUSTED", "LORA_SLOTS_FULL", message)


def finds_it_done(aim: Aim, kept: Kept, reading: EngineReading) -> bool:
    """Whether the engine is as ordered, so that no call is made."""
    if not all(aim.shown(member) for member in reading.members):
        return False
    match aim:
        case PauseAim(command=command):
            pause = kept.pause
            return pause is not None and pause.settled and pause.mode is command.mode
        case SleepAim():
            return bool(kept.released) and not kept.sleep_doubt
        case VersionAim() | LoraAim():
            return True
        case _:
            return False


def remarks(command: Command, reading: EngineReading) -> list[OperationWarning]:
    """What is carried out in another way than its words may be read."""
    holds = isinstance(command, Pause) and command.new_requests is NewRequests.HOLD
    if isinstance(command, Pause) and holds and refuses_new_requests(reading, command.mode):
        said = "this vLLM refuses new requests with 503 while it is paused in that mode"
        return [OperationWarning("NEW_REQUESTS_REFUSED", said)]
    if isinstance(command, ReleaseResources):
        said = "vLLM gives the KV cache back without its content"
        return [OperationWarning("KV_CONTENT_DROPPED", said)]
    return []
