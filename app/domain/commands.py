"""Orders as frozen values, and their JSON form in the ledger.

A command judges itself against what the engine can do (`check_supported`) and against what the
engine has acknowledged (`check_state`); gateway and engine share both, so they refuse alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from app.domain.capabilities import Capabilities
from app.domain.command import Command, fault, refuse_frozen, refuse_released
from app.domain.errors import (
    DrainRunning,
    NotPaused,
    RevisionMismatch,
    StalePauseEpoch,
    WeightsNotValid,
)
from app.domain.facts import EngineFacts
from app.domain.kinds import (
    Admission,
    CacheKind,
    NewRequests,
    OperationKind,
    PauseMode,
    WeightsState,
)
from app.domain.operation import JsonObject, JsonValue
from app.domain.resource_orders import ReleaseResources, RestoreResources
from app.domain.serving_orders import LoadLora, ReconfigureServing, StartProfile, UnloadLora
from app.domain.weight_orders import PauseAround, SetWeightVersion, UnderPause, UpdateWeights

__all__ = [
    "AbortRequests",
    "Command",
    "FlushCaches",
    "LoadLora",
    "Pause",
    "PauseAround",
    "ReconfigureServing",
    "ReleaseResources",
    "RestoreResources",
    "Resume",
    "SetWeightVersion",
    "Shutdown",
    "StartProfile",
    "UnderPause",
    "UnloadLora",
    "UpdateWeights",
    "check_revision",
    "command_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCaches(Command):
    kind = OperationKind.FLUSH_CACHES
    caches: tuple[CacheKind, ...]

    def __post_init__(self) -> None:
        if not self.caches:
            raise fault("/caches", "name at least one cache")
        if len(set(self.caches)) != len(self.caches):
            raise fault("/caches", "name each cache once")

    def document(self) -> JsonObject:
        named: list[JsonValue] = [cache.value for cache in self.caches]
        return {**Command.document(self), "caches": named}

    def check_supported(self, can: Capabilities) -> None:
        Command.check_supported(self, can)
        for cache in self.caches:
            self._require(f"cache {cache.value}", cache in can.cache_kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Command):
    """`hold_limit_ms` None: the engine's advertised default; it has no meaning with REFUSE."""

    kind = OperationKind.PAUSE
    mode: PauseMode
    new_requests: NewRequests = NewRequests.HOLD
    hold_limit_ms: int | None = None

    def __post_init__(self) -> None:
        if self.hold_limit_ms is None:
            return
        if self.new_requests is not NewRequests.HOLD:
            raise fault("/hold_limit_ms", "a hold limit goes with new_requests hold")
        if self.hold_limit_ms <= 0:
            raise fault("/hold_limit_ms", "the hold limit must be above 0 ms")

    def document(self) -> JsonObject:
        limit = {} if self.hold_limit_ms is None else {"hold_limit_ms": self.hold_limit_ms}
        return {
            **Command.document(self),
            "mode": self.mode.value,
            "new_requests": self.new_requests.value,
            **limit,
        }

    def check_supported(self, can: Capabilities) -> None:
        Command.check_supported(self, can)
        self._require(f"mode {self.mode.value}", self.mode in can.pause_modes)
        self._require(
            f"new_requests {self.new_requests.value}", self.new_requests in can.new_requests
        )
        longest = can.limits.max_hold_limit_ms
        if self.hold_limit_ms is not None and longest and self.hold_limit_ms > longest:
            raise fault("/hold_limit_ms", f"the longest hold of this engine is {longest} ms")

    def check_state(self, facts: EngineFacts) -> None:
        if self.mode is PauseMode.DRAIN:
            refuse_frozen(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Command):
    """Lifts the pause of that epoch, and no other."""

    kind = OperationKind.RESUME
    pause_epoch: int

    def __post_init__(self) -> None:
        if self.pause_epoch <= 0:
            raise fault("/pause_epoch", "name the epoch of the pause to lift; epochs start at 1")

    def document(self) -> JsonObject:
        return {**Command.document(self), "pause_epoch": self.pause_epoch}

    def check_state(self, facts: EngineFacts) -> None:
        if self.pause_epoch != facts.pause_epoch:
            raise StalePauseEpoch(given=self.pause_epoch, current=facts.pause_epoch)
        if facts.admission is Admission.DRAINING:
            raise DrainRunning("a drain is running: cancel it, or abort its requests")
        if facts.admission is Admission.OPEN:
            raise NotPaused("the engine is not paused")
        refuse_released(facts.released)
        if facts.weights.state not in (WeightsState.VALID, WeightsState.UNKNOWN):
            raise WeightsNotValid(facts.weights.shortfall)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests(Command):
    """Either named requests or all of them, never by leaving something out."""

    kind = OperationKind.ABORT_REQUESTS
    request_ids: tuple[str, ...] = ()
    all: bool = False

    def __post_init__(self) -> None:
        if self.all == bool(self.request_ids):
            raise fault("/request_ids", "give request_ids, or all: true")
        if "" in self.request_ids:
            # On the wire an empty id is an absent one, which some engines read as all of them.
            raise fault("/request_ids", "a request id is never empty")
        if len(set(self.request_ids)) != len(self.request_ids):
            raise fault("/request_ids", "name each request once")

    def document(self) -> JsonObject:
        ids: list[JsonValue] = list(self.request_ids)
        wanted: dict[str, JsonValue] = {"all": True} if self.all else {"request_ids": ids}
        return {**Command.document(self), **wanted}

    def check_supported(self, can: Capabilities) -> None:
        Command.check_supported(self, can)
        self._require("all: true", can.abort_all or not self.all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown(Command):
    """Ends the engine. It has succeeded when the engine process is gone."""

    kind = OperationKind.SHUTDOWN


def check_revision(expected: int | None, facts: EngineFacts, *, from_header: bool = False) -> None:
    """Compare-and-swap on the administrative state. Raises RevisionMismatch."""
    if expected is not None and expected != facts.revision:
        raise RevisionMismatch(expected=expected, current=facts.revision, from_header=from_header)


def command_of(kind: OperationKind, document: JsonObject) -> Command:
    """Read back what `Command.document` wrote. KeyError or ValueError: not written by it."""
    return _READERS[kind](document)


def _model(document: JsonObject) -> str | None:
    return cast("str | None", document.get("model"))


def _flush(document: JsonObject) -> Command:
    names = cast("list[str]", document["caches"])
    return FlushCaches(model=_model(document), caches=tuple(CacheKind(name) for name in names))


def _pause(document: JsonObject) -> Command:
    return Pause(
        model=_model(document),
        mode=PauseMode(cast("str", document["mode"])),
        new_requests=NewRequests(cast("str", document["new_requests"])),
        hold_limit_ms=cast("int | None", document.get("hold_limit_ms")),
    )


def _resume(document: JsonObject) -> Command:
    return Resume(model=_model(document), pause_epoch=cast("int", document["pause_epoch"]))


def _abort(document: JsonObject) -> Command:
    ids = cast("list[str]", document.get("request_ids", []))
    return AbortRequests(
        model=_model(document), request_ids=tuple(ids), all=bool(document.get("all", False))
    )


def _shutdown(document: JsonObject) -> Command:
    return Shutdown(model=_model(document))


_READERS: Mapping[OperationKind, Callable[[JsonObject], Command]] = {
    OperationKind.FLUSH_CACHES: _flush,
    OperationKind.PAUSE: _pause,
    OperationKind.RESUME: _resume,
    OperationKind.ABORT_REQUESTS: _abort,
    OperationKind.RELEASE_RESOURCES: ReleaseResources.of,
    OperationKind.RESTORE_RESOURCES: RestoreResources.of,
    OperationKind.UPDATE_WEIGHTS: UpdateWeights.of,
    OperationKind.SET_WEIGHT_VERSION: SetWeightVersion.of,
    OperationKind.PROFILE: StartProfile.of,
    OperationKind.RECONFIGURE_SERVING: ReconfigureServing.of,
    OperationKind.LOAD_LORA: LoadLora.of,
    OperationKind.UNLOAD_LORA: UnloadLora.of,
    OperationKind.SHUTDOWN: _shutdown,
}
