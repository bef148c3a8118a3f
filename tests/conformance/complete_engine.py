"""A right engine behind the kit that offers everything the cases look at, without a model.

Each rank holds weights of its own, bytes by name, read from safetensors files below one root, from
the order, or from shared memory. What a request is answered with depends on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from app.conformance.tensors import DTYPES, Tensor, Weights, parsed
from app.domain.commands import ReconfigureServing, UpdateWeights
from app.domain.kinds import (
    OperationKind,
    TensorDtype,
    WeightSourceKind,
)
from app.domain.weight_sources import (
    DiskWeights,
    InlineWeights,
    SharedMemoryWeights,
    TensorSpec,
    WeightSource,
)
from app.enginekit.runtime import Conclusion, Order, RankEvidence, RuntimeFault
from tests.conformance.telling_engine import TellingEngine
from tests.enginekit.minimal_engine import hang

PREFIX = "chadburn-test-"
MOST_RANKS = 4
_WORDS = {dtype: word for word, dtype in zip(
    ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL"),
    TensorDtype,
    strict=True,
)}  # fmt: skip


def weights_of(seed: int) -> Weights:
    """A few tensors; other seeds give other values."""

    def values(count: int, start: int) -> bytes:
        return b"".join(
            ((start + at) % 7 + seed).to_bytes(2, "little") + b"\x80\x3f" for at in range(count)
        )

    return (
        Tensor("embedding", "F32", (4, 3), values(12, 0)),
        Tensor("layer.weight", "F32", (3, 4), values(12, 3)),
        Tensor("norm", "F32", (4,), values(4, 5)),
    )


class CompleteEngine(TellingEngine):
    """`root`: where files may lie."""

    root = Path("/nowhere")

    def __init__(self, *, world_size: int = 2, **options: Any) -> None:
        super().__init__(world_size=world_size, **options)
        self.live: dict[int, Weights] = dict.fromkeys(self.ranks, weights_of(1))
        self._beside: dict[tuple[str, int], Weights] = {}
        self._replaced: dict[tuple[str, int], Weights] = {}
        cancellable = frozenset({OperationKind.PAUSE, OperationKind.UPDATE_WEIGHTS})
        self.offered = replace(
            self.offered,
            weight_sources=frozenset(WeightSourceKind) - {WeightSourceKind.SESSION},
            weight_sessions=frozenset(),
            cancellable=cancellable,
            reconfigurable=self.offered.reconfigurable,
        )
        self._tell_apart()

    def _tell_apart(self) -> None:
        """Answers of other weights are other words."""
        self.accent = digest(self.live[0]).hex()[:4]

    async def prepare(self, order: Order, rank: int) -> None:
        await super().prepare(order, rank)
        command = order.command
        if isinstance(command, ReconfigureServing):
            self.check_shape(command)
        if not isinstance(command, UpdateWeights):
            return
        if command.source.kind is WeightSourceKind.DISTRIBUTED:
            await hang(order, rank)  # for a trainer
        weights = self.read(command.source)
        self.check(weights, finite=command.check_finite)
        self._beside[order.operation_id, rank] = weights

    async def commit(self, order: Order, rank: int) -> None:
        await super().commit(order, rank)
        key = order.operation_id, rank
        if isinstance(order.command, UpdateWeights):
            self._replaced[key] = self.live[rank]
            self.live[rank] = self._beside.pop(key)
            self._tell_apart()

    async def rollback(self, order: Order, rank: int) -> None:
        await super().rollback(order, rank)
        key = order.operation_id, rank
        self._beside.pop(key, None)
        if key in self._replaced:
            self.live[rank] = self._replaced.pop(key)
            self._tell_apart()

    def evidence(self) -> tuple[RankEvidence, ...]:
        return tuple(
            RankEvidence(
                rank,
                len(self.live[rank]),
                sum(len(tensor.data) for tensor in self.live[rank]),
                hashlib.sha256(bytes([rank]) + digest(self.live[rank])).digest(),
            )
            for rank in self.ranks
        )

    def _reshaped(self, command: ReconfigureServing) -> Conclusion:
        concluded = super()._reshaped(command)
        self.live = {rank: self.live.get(rank, self.live[0]) for rank in self.ranks}
        return concluded

    async def profiled(self, profile_id: str) -> None:
        self.steps_done.clear()
        await super().profiled(profile_id)

    def check_shape(self, command: ReconfigureServing) -> None:
        if (command.tensor_parallel_size or 1) > MOST_RANKS:
            raise RuntimeFault("NO_SUCH_SHAPE", f"there are {MOST_RANKS} devices")

    # ---- what an update brings ----

    def read(self, source: WeightSource) -> Weights:
        match source:
            case DiskWeights():
                return self.from_disk(source)
            case InlineWeights(tensors=tensors):
                return tuple(_tensor(one.spec, one.data or b"") for one in tensors)
            case SharedMemoryWeights():
                return self.from_memory(source)
        raise RuntimeFault("SOURCE_REFUSED", "not from there")

    def from_disk(self, source: DiskWeights) -> Weights:
        folder = Path(source.path).resolve()
        if not folder.is_relative_to(self.root.resolve()) or not folder.is_dir():
            raise RuntimeFault("SOURCE_REFUSED", "not there, or not below an allowed root")
        wanted = {one.name: one.sha256 for one in source.digests}
        found: list[Tensor] = []
        for file in sorted(folder.glob("*.safetensors")):
            raw = file.read_bytes()
            if wanted.get(file.name, (said := hashlib.sha256(raw).hexdigest())) != said:
                raise RuntimeFault("SOURCE_REFUSED", "another digest")
            try:
                found += parsed(raw)
            except (ValueError, KeyError, TypeError) as error:
                raise RuntimeFault("SOURCE_REFUSED", "the file is damaged") from error
        return tuple(found)

    def from_memory(self, source: SharedMemoryWeights) -> Weights:
        if not source.object_name.startswith(PREFIX):
            raise RuntimeFault("SOURCE_REFUSED", f"segments begin with {PREFIX}")
        raw = (Path("/dev/shm") / source.object_name).read_bytes()
        found = []
        for one in source.tensors:
            end = one.offset_bytes + one.spec.size_bytes
            if end > len(raw):
                raise RuntimeFault("SOURCE_REFUSED", "the segment is not whole")
            found.append(_tensor(one.spec, raw[one.offset_bytes : end]))
        return tuple(found)

    def check(self, weights: Weights, *, finite: bool) -> None:
        for rule in self.rules():
            if fault := rule(weights):
                raise RuntimeFault("SOURCE_REFUSED", fault)
        if finite:
            self.check_finite(weights)

    def rules(self) -> Sequence[Callable[[Weights], str]]:
        return (names_fit, shapes_fit, types_fit)

    def check_finite(self, weights: Weights) -> None:
        nan = DTYPES["F32"].nan
        for tensor in weights:
            if any(tensor.data[at : at + 4] == nan for at in range(0, len(tensor.data), 4)):
                raise RuntimeFault("NOT_FINITE", f"{tensor.name} holds a NaN")


Rule: TypeAlias = Callable[[Weights], str]
_MODEL = {tensor.name: tensor for tensor in weights_of(1)}


def names_fit(weights: Weights) -> str:
    return "" if {tensor.name for tensor in weights} == set(_MODEL) else "other names"


def shapes_fit(weights: Weights) -> str:
    return "" if all(t.shape == _MODEL[t.name].shape for t in weights) else "another shape"


def types_fit(weights: Weights) -> str:
    return "" if all(t.dtype == _MODEL[t.name].dtype for t in weights) else "another type"


def digest(weights: Weights) -> bytes:
    whole = hashlib.sha256()
    for tensor in sorted(weights, key=lambda one: one.name):
        whole.update(tensor.name.encode() + tensor.data)
    return whole.digest()


def _tensor(spec: TensorSpec, data: bytes) -> Tensor:
    return Tensor(spec.name, _WORDS[spec.dtype], spec.shape, data)
