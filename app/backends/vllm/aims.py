"""Orders that one call to each member carries out, and that show in what can be read: what is sent,
what is then seen, and what follows from it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol, TypeVar, cast

from app.backends.vllm.kept import Kept, UnderWay
from app.backends.vllm.observing import PAUSING, SENDING, SLEEPING, asleep, pause_of
from app.backends.vllm.readings import EngineReading, MemberReading
from app.backends.vllm.refusals import unknown
from app.domain.commands import (
    Command,
    LoadLora,
    Pause,
    ReleaseResources,
    Resume,
    SetWeightVersion,
    UnloadLora,
)
from app.domain.kinds import ContentPolicy, DrainRule, PauseMode, Verification
from app.domain.operation import JsonObject, JsonValue, OperationError
from app.rpc.vllm import control_pb2 as pb

MODES = {
    PauseMode.DRAIN: pb.PAUSE_MODE_WAIT,
    PauseMode.ABORT: pb.PAUSE_MODE_ABORT,
    PauseMode.KEEP: pb.PAUSE_MODE_KEEP,
}


class Aim(Protocol):
    """`step`: written down before the call. `verified`: whether what is seen confirms it."""

    @property
    def rpc(self) -> str: ...

    @property
    def step(self) -> str: ...

    @property
    def verified(self) -> Verification: ...

    def request(self) -> Any: ...

    def shown(self, member: MemberReading) -> bool:
        """Whether the member is as ordered, as far as can be seen."""

    def shown_before(self, kept: Kept) -> bool:
        """Whether it looked the same before, so that looking proves nothing."""

    def took(self, kept: Kept, way: UnderWay, now: datetime, *, settled: bool = True) -> Kept:
        """What is kept once it has taken effect. `settled` False: it has begun to, as is seen, and
        nobody has seen it end."""

    def result(self, kept: Kept) -> dict[str, JsonValue]: ...

    def unsettled(self, ranks: tuple[int, ...]) -> OperationError | None:
        """What is to be said when the reply is lost, though it shows on every member. None: what
        is seen is enough."""


@dataclass(frozen=True, slots=True)
class PauseAim:
    command: Pause
    rpc: str = "PauseGeneration"
    step: str = PAUSING
    verified: Verification = Verification.VERIFIED

    def request(self) -> pb.PauseGenerationRequest:
        # A pause is no flush: what is cached stays, unless an update wants it gone.
        return pb.PauseGenerationRequest(mode=MODES[self.command.mode], clear_cache=False)

    def shown(self, member: MemberReading) -> bool:
        return bool(member.paused)

    def shown_before(self, kept: Kept) -> bool:
        return kept.pause is not None

    def took(self, kept: Kept, way: UnderWay, now: datetime, *, settled: bool = True) -> Kept:
        drain = self.command.mode is PauseMode.DRAIN
        return kept.paused(pause_of(way, now, settled=settled or not drain))

    def result(self, kept: Kept) -> dict[str, JsonValue]:
        return {"pause_epoch": kept.pause_epoch}

    def unsettled(self, ranks: tuple[int, ...]) -> OperationError | None:
        if self.command.mode is not PauseMode.DRAIN:
            return None
        message = "admission is closed; whether requests are still at work is not known"
        return unknown("DRAIN_UNCONFIRMED", message, ranks, in_part=True)


@dataclass(frozen=True, slots=True)
class ResumeAim:
    rpc: str = "ResumeGeneration"
    step: str = SENDING
    verified: Verification = Verification.VERIFIED

    def request(self) -> pb.ResumeGenerationRequest:
        return pb.ResumeGenerationRequest()

    def shown(self, member: MemberReading) -> bool:
        return member.paused is False

    def shown_before(self, kept: Kept) -> bool:
        return kept.pause is None

    def took(self, kept: Kept, way: UnderWay, now: datetime, *, settled: bool = True) -> Kept:
        return replace(kept, pause=None if settled else kept.pause).changed()

    def result(self, kept: Kept) -> dict[str, JsonValue]:
        return {"pause_epoch": kept.pause_epoch}

    def unsettled(self, ranks: tuple[int, ...]) -> OperationError | None:
        return None


@dataclass(frozen=True, slots=True)
class SleepAim:
    """That it sleeps can't be told from a pause: the engine's word is all there is."""

    command: ReleaseResources
    paused_by: PauseMode | None
    rpc: str = "Sleep"
    step: str = SLEEPING
    verified: Verification = Verification.UNVERIFIED

    def request(self) -> pb.SleepRequest:
        level = 2 if self.command.content is ContentPolicy.DISCARD else 1
        return pb.SleepRequest(level=level, mode=MODES[self.mode])

    @property
    def mode(self) -> PauseMode:
        """Of a paused engine its own, so that nothing changes for its requests."""
        if self.command.drain is DrainRule.ABORT:
            return PauseMode.ABORT
        return self.paused_by or PauseMode.DRAIN

    def shown(self, member: MemberReading) -> bool:
        return bool(member.sleeping) and bool(member.paused)

    def shown_before(self, kept: Kept) -> bool:
        # Also where it was paused before: it is taken for a sleep, with a doubt.
        return False

    def took(self, kept: Kept, way: UnderWay, now: datetime, *, settled: bool = True) -> Kept:
        after = replace(asleep(kept, way), sleep_doubt=not settled)
        if kept.pause is not None:
            return after
        by = UnderWay(
            operation_id=way.operation_id,
            kind=way.kind,
            step=way.step,
            request={"mode": self.mode.value},
        )
        pause = pause_of(by, now, settled=settled or self.mode is not PauseMode.DRAIN)
        return replace(after, pause=pause, pause_epoch=after.pause_epoch + 1)

    def result(self, kept: Kept) -> dict[str, JsonValue]:
        return {**released(kept), "pause_epoch": kept.pause_epoch}

    def unsettled(self, ranks: tuple[int, ...]) -> OperationError | None:
        message = "whether memory was given back is not known; it is taken as given back"
        return unknown("RELEASE_UNCONFIRMED", message, ranks, in_part=True)


def released(kept: Kept) -> dict[str, JsonValue]:
    """As results of releases and restores tell it; how much memory that is vLLM does not say."""
    names: list[JsonValue] = [kind.value for kind in sorted(kept.released)]
    return {"release_epoch": kept.release_epoch, "released": names, "memory": []}


@dataclass(frozen=True, slots=True)
class VersionAim:
    command: SetWeightVersion
    rpc: str = "UpdateWeightVersion"
    step: str = SENDING
    verified: Verification = Verification.VERIFIED

    def request(self) -> pb.UpdateWeightVersionRequest:
        return pb.UpdateWeightVersionRequest(weight_version=self.command.weight_version)

    def shown(self, member: MemberReading) -> bool:
        return member.version == self.command.weight_version

    def shown_before(self, kept: Kept) -> bool:
        return kept.version == self.command.weight_version

    def took(self, kept: Kept, way: UnderWay, now: datetime, *, settled: bool = True) -> Kept:
        version = self.command.weight_version if settled else None
        return replace(kept, version=version).changed()

    def result(self, kept: Kept) -> dict[str, JsonValue]:
        return {"weight_version": self.command.weight_version}

    def unsettled(self, ranks: tuple[int, ...]) -> OperationError | None:
        return None


@dataclass(frozen=True, slots=True)
class LoraAim:
    command: LoadLora | UnloadLora
    reading: EngineReading
    step: str = SENDING
    verified: Verification = Verification.VERIFIED

    @property
    def rpc(self) -> str:
        return "LoadLora" if isinstance(self.command, LoadLora) else "UnloadLora"

    def request(self) -> pb.LoadLoraRequest | pb.UnloadLoraRequest:
        name = self.command.name
        if isinstance(self.command, LoadLora):
            return pb.LoadLoraRequest(lora_name=name, source_path=self.command.path)
        return pb.UnloadLoraRequest(lora_name=name)

    def shown(self, member: MemberReading) -> bool:
        found = [lora for lora in member.loras or () if lora.name == self.command.name]
        if isinstance(self.command, UnloadLora):
            return not found
        return any(lora.path == self.command.path for lora in found)

    def shown_before(self, kept: Kept) -> bool:
        there = any(lora.name == self.command.name for lora in kept.loras)
        return there is isinstance(self.command, LoadLora)

    def took(self, kept: Kept, way: UnderWay, now: datetime, *, settled: bool = True) -> Kept:
        return replace(kept, loras=self.reading.loras).changed()

    def result(self, kept: Kept) -> dict[str, JsonValue]:
        for lora in kept.loras:
            if lora.name == self.command.name:
                return {"lora": {"name": lora.name, "id": lora.id, "path": lora.path}}
        return {"lora": None}

    def unsettled(self, ranks: tuple[int, ...]) -> OperationError | None:
        return None


_C = TypeVar("_C", bound=Command)


def aim_of(command: Command, kept: Kept, reading: EngineReading) -> Aim | None:
    """`kept`: as before the order. `reading`: the latest. None: it takes more than one call."""
    making = _AIMS.get(type(command))
    return None if making is None else making(command, kept, reading)


def _lora(command: Command, _kept: Kept, reading: EngineReading) -> Aim:
    return LoraAim(cast("LoadLora | UnloadLora", command), reading)


def _sleep(command: Command, kept: Kept, _reading: EngineReading) -> Aim:
    return SleepAim(cast("ReleaseResources", command), kept.pause.mode if kept.pause else None)


_AIMS: Mapping[type[Command], Callable[[Any, Kept, EngineReading], Aim]] = {
    Pause: lambda command, _kept, _reading: PauseAim(command),
    Resume: lambda _command, _kept, _reading: ResumeAim(),
    SetWeightVersion: lambda command, _kept, _reading: VersionAim(command),
    ReleaseResources: _sleep,
    LoadLora: _lora,
    UnloadLora: _lora,
}


def unchanged(aim: Aim, kept: Kept) -> JsonObject:
    """The result of an order that finds the engine as it wants it."""
    return {"changed": False, **aim.result(kept)}
