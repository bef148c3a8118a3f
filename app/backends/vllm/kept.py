"""What vLLM keeps no record of and can't be asked: kept here, one row for each engine.

The values are those of the last moment that was certain. While an order is carried out they stay,
and `under_way` says which order it is and how far it has come: written before each call that
changes something, so that whoever finds it there knows what may have been sent, and whoever does
not find it knows that nothing was.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import cast

from app.domain.facts import LoraFact
from app.domain.kept_state import KeptState
from app.domain.kinds import (
    FailureEffect,
    OperationKind,
    PauseMode,
    ResourceKind,
    Verification,
    WeightsState,
)
from app.domain.operation import JsonObject, JsonValue, OperationError
from app.domain.transitions import Cancelled, Completed, Failed

End = Completed | Failed | Cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPause:
    """`mode` None: another client's. `settled` False: nobody has seen its drain end, so requests
    may still be at work. `by`: an operation; empty: another client. UTC."""

    mode: PauseMode | None
    by: str = ""
    since: datetime | None = None
    settled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """`step`: the last one that was begun. `request`: the order's own document."""

    operation_id: str
    kind: OperationKind
    step: str
    request: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    operation_id: str
    end: End


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """`instance_ids`: of the members, in their order. `sleep_doubt`: whether it sleeps can't be
    told, since somebody else has paused it, or since a release or restore of ours was lost; where
    `released` names something, that may be awake. `session_open`: the engine has a weight
    session open that nobody goes on with. `group`: that the engine has joined apart from an update,
    and stays in. `weights`: valid unless something is known against it.
    """

    number: int = 0
    revision: int = 0
    pause_epoch: int = 0
    release_epoch: int = 0
    instance_ids: tuple[str, ...] = ()
    pause: HeldPause | None = None
    released: frozenset[ResourceKind] = frozenset()
    sleep_doubt: bool = False
    weights: WeightsState = WeightsState.VALID
    version: str | None = None
    updates_since_flush: int = 0
    loras: tuple[LoraFact, ...] = ()
    session_open: bool = False
    group: JsonObject | None = None
    under_way: UnderWay | None = None
    abandoned: bool = False
    ended: Ended | None = None

    def changed(self) -> Kept:
        """The revision rises: an administrative fact is another now."""
        return replace(self, revision=self.revision + 1)

    def paused(self, pause: HeldPause) -> Kept:
        """With an epoch of its own."""
        return replace(self, pause=pause, pause_epoch=self.pause_epoch + 1).changed()

    def at(self, step: str) -> Kept:
        assert self.under_way is not None
        return replace(self, under_way=replace(self.under_way, step=step))

    def over(self, end: End | None) -> Kept:
        """Nothing is under way any more. `end` None: nothing came of it, and it is forgotten."""
        ended = self.ended
        if end is not None and self.under_way is not None:
            ended = Ended(self.under_way.operation_id, end)
        return replace(self, under_way=None, abandoned=False, ended=ended)

    # ---- to where it is kept, and back ----

    def state(self) -> KeptState:
        """The next version."""
        way = self.under_way
        loras: list[JsonValue] = [{"name": a.name, "id": a.id, "path": a.path} for a in self.loras]
        released: list[JsonValue] = [kind.value for kind in sorted(self.released)]
        return KeptState(
            number=self.number + 1,
            revision=self.revision,
            pause_epoch=self.pause_epoch,
            release_epoch=self.release_epoch,
            operation_id=None if way is None else way.operation_id,
            document={
                "instance_ids": list(self.instance_ids),
                "pause": _pause_document(self.pause),
                "released": released,
                "sleep_doubt": self.sleep_doubt,
                "weights": self.weights.value,
                "version": self.version,
                "updates_since_flush": self.updates_since_flush,
                "loras": loras,
                "session_open": self.session_open,
                "group": None if self.group is None else dict(self.group),
                "under_way": None
                if way is None
                else {"kind": way.kind.value, "step": way.step, "request": dict(way.request)},
                "ended": None
                if self.ended is None
                else {"id": self.ended.operation_id, **_end_document(self.ended.end)},
            },
        )

    @classmethod
    def of(cls, state: KeptState) -> Kept:
        """Of an engine that was of another dialect before, only the counters go on."""
        parts = state.document
        if "instance_ids" not in parts:
            return cls(
                number=state.number,
                revision=state.revision,
                pause_epoch=state.pause_epoch,
                release_epoch=state.release_epoch,
            )
        way = cast("JsonObject | None", parts["under_way"])
        ended = cast("JsonObject | None", parts["ended"])
        loras = cast("list[JsonObject]", parts["loras"])
        return cls(
            number=state.number,
            revision=state.revision,
            pause_epoch=state.pause_epoch,
            release_epoch=state.release_epoch,
            instance_ids=tuple(cast("list[str]", parts["instance_ids"])),
            pause=_pause_of(cast("JsonObject | None", parts["pause"])),
            released=frozenset(ResourceKind(name) for name in cast("list[str]", parts["released"])),
            sleep_doubt=bool(parts["sleep_doubt"]),
            weights=WeightsState(cast("str", parts["weights"])),
            version=cast("str | None", parts["version"]),
            updates_since_flush=cast("int", parts["updates_since_flush"]),
            loras=tuple(
                LoraFact(cast("str", a["name"]), cast("int", a["id"]), cast("str", a["path"]))
                for a in loras
            ),
            session_open=bool(parts["session_open"]),
            group=cast("JsonObject | None", parts.get("group")),
            under_way=None
            if way is None
            else UnderWay(
                operation_id=state.operation_id or "",
                kind=OperationKind(cast("str", way["kind"])),
                step=cast("str", way["step"]),
                request=cast("JsonObject", way["request"]),
            ),
            abandoned=state.abandoned,
            ended=None if ended is None else Ended(cast("str", ended["id"]), _end_of(ended)),
        )


def _pause_document(pause: HeldPause | None) -> JsonValue:
    if pause is None:
        return None
    return {
        "mode": None if pause.mode is None else pause.mode.value,
        "by": pause.by,
        "since": None if pause.since is None else pause.since.isoformat(),
        "settled": pause.settled,
    }


def _pause_of(parts: JsonObject | None) -> HeldPause | None:
    if parts is None:
        return None
    mode, since = cast("str | None", parts["mode"]), cast("str | None", parts["since"])
    return HeldPause(
        mode=None if mode is None else PauseMode(mode),
        by=cast("str", parts["by"]),
        since=None if since is None else datetime.fromisoformat(since),
        settled=bool(parts["settled"]),
    )


def _end_document(end: End) -> dict[str, JsonValue]:
    match end:
        case Completed():
            said: dict[str, JsonValue] = {
                "result": dict(end.result),
                "verification": end.verification.value,
            }
            return {"completed": said, "revision": end.revision}
        case Failed(error=error):
            told: dict[str, JsonValue] = {
                "code": error.code,
                "reason": error.reason,
                "message": error.message,
                "retryable": error.retryable,
                "ranks": list(error.ranks),
                "effect": error.effect.value,
            }
            return {"failed": told, "revision": end.revision}
        case Cancelled():
            return {"cancelled": end.message, "revision": end.revision}


def _end_of(parts: JsonObject) -> End:
    revision = cast("int | None", parts["revision"])
    if "cancelled" in parts:
        return Cancelled(message=cast("str", parts["cancelled"]), revision=revision)
    if "failed" in parts:
        told = cast("JsonObject", parts["failed"])
        error = OperationError(
            code=cast("str", told["code"]),
            reason=cast("str", told["reason"]),
            message=cast("str", told["message"]),
            retryable=bool(told["retryable"]),
            ranks=tuple(cast("list[int]", told["ranks"])),
            effect=FailureEffect(cast("str", told["effect"])),
        )
        return Failed(error=error, revision=revision)
    said = cast("JsonObject", parts["completed"])
    return Completed(
        result=cast("JsonObject", said["result"]),
        verification=Verification(cast("str", said["verification"])),
        revision=revision,
    )
