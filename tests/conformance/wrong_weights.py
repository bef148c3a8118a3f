"""Wrong about updates of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.conformance.tensors import Weights, altered
from app.domain.commands import UpdateWeights
from app.domain.weight_sources import DiskWeights, SharedMemoryWeights
from app.enginekit.runtime import Conclusion, Order, RankEvidence, RuntimeFault
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.conformance.complete_engine import (
    PREFIX,
    CompleteEngine,
    names_fit,
    shapes_fit,
    types_fit,
    weights_of,
)
from tests.conformance.faulty import Event, Fault, kind_of

# ---- what is read ----


class ReadsAnyPath(CompleteEngine):
    def from_disk(self, source: DiskWeights) -> Weights:
        kept, self.root = self.root, Path("/")
        try:
            return super().from_disk(source)
        finally:
            self.root = kept


class ReadsSomethingElse(CompleteEngine):
    """Where nothing is, it loads what it has loaded before."""

    def from_disk(self, source: DiskWeights) -> Weights:
        try:
            return super().from_disk(source)
        except RuntimeFault:
            return self.live[0]


class FollowsLinks(ReadsAnyPath):
    def from_disk(self, source: DiskWeights) -> Weights:
        if not Path(source.path).is_relative_to(self.root):
            raise RuntimeFault("SOURCE_REFUSED", "not below an allowed root")
        return super().from_disk(source)


class AnySegment(CompleteEngine):
    def from_memory(self, source: SharedMemoryWeights) -> Weights:
        path = Path("/dev/shm") / source.object_name
        aside = path.with_name(f"{PREFIX}{path.name}")
        aside.write_bytes(path.read_bytes())
        try:
            return super().from_memory(replace(source, object_name=aside.name))
        finally:
            aside.unlink()


class IgnoresDigests(CompleteEngine):
    def from_disk(self, source: DiskWeights) -> Weights:
        return super().from_disk(replace(source, digests=()))


class AnyNames(CompleteEngine):
    def rules(self) -> Sequence[Callable[[Weights], str]]:
        return ()


class AnyShape(CompleteEngine):
    def rules(self) -> Sequence[Callable[[Weights], str]]:
        return (names_fit, types_fit)


class AnyType(CompleteEngine):
    def rules(self) -> Sequence[Callable[[Weights], str]]:
        return (names_fit, shapes_fit)


class AnyNumber(CompleteEngine):
    def check_finite(self, weights: Weights) -> None:
        return


class FillsWithZeros(CompleteEngine):
    """What is missing, and what is cut off."""

    def read(self, source: Any) -> Weights:
        try:
            found = {tensor.name: tensor for tensor in super().read(source)}
        except RuntimeFault:
            found = {}
        return tuple(
            found.get(one.name, replace(one, data=bytes(len(one.data)))) for one in weights_of(1)
        )


class PadsTensors(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "UpdateWeights":
            for one in request.tensors.inline.tensors:
                size = 4
                for length in one.spec.shape:
                    size *= length
                one.data = one.data.ljust(size, b"\0")
        return request


# ---- what is done ----


class NotAtomic(CompleteEngine):
    """An update that fails leaves the new version behind."""

    async def prepare(self, order: Order, rank: int) -> None:
        try:
            await super().prepare(order, rank)
        except RuntimeFault:
            assert isinstance(order.command, UpdateWeights)
            version = order.command.weight_version
            self.held[rank] = replace(self.held[rank], version=version)
            raise


class LosesTheOld(CompleteEngine):
    """An update that fails leaves the old version's name, and other values."""

    async def prepare(self, order: Order, rank: int) -> None:
        try:
            await super().prepare(order, rank)
        except RuntimeFault:
            self.live[rank] = altered(self.live[rank])
            self._tell_apart()
            raise


class LoadsNothing(CompleteEngine):
    """False success."""

    def read(self, source: Any) -> Weights:
        super().read(source)
        return self.live[0]


class LoadsForShow(CompleteEngine):
    """Its evidence is that of the source; what answers is what was there."""

    def _tell_apart(self) -> None:
        self.accent = "always"


class EvidenceOfOneRank(CompleteEngine):
    def evidence(self) -> tuple[RankEvidence, ...]:
        return super().evidence()[:1]


class NoEvidenceOfTensors(CompleteEngine):
    async def conclude(self, order: Order) -> Conclusion:
        command = order.command
        if isinstance(command, UpdateWeights) and not isinstance(command.source, DiskWeights):
            self.silent = set(self.ranks)
        concluded = await super().conclude(order)
        if self.silent:
            concluded = replace(concluded, evidence=())
        self.silent = set()
        return concluded


class EvidenceOfTheVersion(CompleteEngine):
    """Checks what it is called, not what it is."""

    def evidence(self) -> tuple[RankEvidence, ...]:
        return tuple(
            replace(one, sha256=(self.held[0].version.encode() * 32)[-32:])
            for one in super().evidence()
        )


# ---- admission ----


class UpdateResumes(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if method == "UpdateWeights" and kind_of(event) == "completed":
            self.state.resumed(None)
        return (event,)


class UpdateNeedsNoPause(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "UpdateWeights" and request.HasField("under_pause"):
            request.pause.mode = pb.PAUSE_MODE_KEEP
        return request


class _OtherMode(Fault):
    modes: tuple[Any, Any]

    async def asked(self, method: str, request: Any) -> Any:
        if method == "UpdateWeights" and request.pause.mode == self.modes[0]:
            request.pause.mode = self.modes[1]
        return request


class UpdateEndsRequests(_OtherMode):
    modes = (pb.PAUSE_MODE_DRAIN, pb.PAUSE_MODE_ABORT)


class UpdateLosesRequests(_OtherMode):
    modes = (pb.PAUSE_MODE_KEEP, pb.PAUSE_MODE_ABORT)


class UpdateSparesRequests(_OtherMode):
    modes = (pb.PAUSE_MODE_ABORT, pb.PAUSE_MODE_KEEP)


class CountsNoUpdates(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "completed" and method == "UpdateWeights":
            event.completed.update_weights.updates_since_flush = 0
        return (event,)


class KeepsInSilence(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        return () if kind_of(event) == "warning" else (event,)
