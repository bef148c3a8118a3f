"""Updates of weights as they may be sent: where the weights come from, and under which pause."""

from __future__ import annotations

import base64
from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints

from app.domain.command import fault
from app.domain.commands import (
    Command,
    PauseAround,
    SetWeightVersion,
    UnderPause,
    UpdateWeights,
)
from app.domain.kinds import (
    CachePolicy,
    CollectiveBackend,
    Component,
    NewRequests,
    PauseMode,
)
from app.domain.weight_orders import AdmissionRule
from app.domain.weight_sessions import SessionStage
from app.domain.weight_sources import (
    DiskWeights,
    DistributedWeights,
    FileDigest,
    InlineTensor,
    InlineWeights,
    SharedMemoryTensor,
    SharedMemoryWeights,
    WeightSource,
)
from app.http.bodies import BIGGEST, Address, Body, Count, OrderBody, sequence
from app.http.session_bodies import SessionSourceBody, WeightVersion
from app.http.tensor_bodies import GroupRank, Path, TensorName, TensorSpecBody

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Epoch = Annotated[int, Field(ge=1, le=BIGGEST)]
Milliseconds = Annotated[int, Field(ge=1, le=BIGGEST)]


class FileDigestBody(Body):
    name: TensorName = Field(description="Below the path of the source.")
    sha256: Sha256

    def digest(self) -> FileDigest:
        return FileDigest(self.name, self.sha256)


class DiskSourceBody(Body):
    """Safetensors files in a folder that the engine can read, below one of its allowed roots."""

    path: Path = Field(description="As the engine's host sees it.")
    digests: Annotated[
        tuple[FileDigestBody, ...], Field(max_length=4096), BeforeValidator(sequence)
    ] = Field((), description="Of the files that are to be checked before they are used.")

    def source(self) -> DiskWeights:
        return DiskWeights(self.path, tuple(one.digest() for one in self.digests))


class SharedTensorBody(TensorSpecBody):
    offset_bytes: Count


class SharedMemorySourceBody(Body):
    """A POSIX shared memory object on the engine's machine, of the engine's prefix and owner."""

    object_name: TensorName
    size_bytes: Count
    tensors: Annotated[
        tuple[SharedTensorBody, ...],
        Field(min_length=1, max_length=65536),
        BeforeValidator(sequence),
    ]
    sha256: Sha256 | None = Field(None, description="Of the whole object.")

    def source(self) -> SharedMemoryWeights:
        return SharedMemoryWeights(
            object_name=self.object_name,
            size_bytes=self.size_bytes,
            tensors=tuple(SharedMemoryTensor(one.spec(), one.offset_bytes) for one in self.tensors),
            sha256=self.sha256,
        )


class InlineTensorBody(TensorSpecBody):
    data: Annotated[str, StringConstraints(max_length=1 << 30)] = Field(
        description="Base64: the elements row by row, little endian, without padding between them.",
        json_schema_extra={"contentEncoding": "base64"},
    )

    def tensor(self, pointer: str) -> InlineTensor:
        """Raises InvalidArgument."""
        try:
            data = base64.b64decode(self.data, validate=True)
        except ValueError:
            raise fault(f"{pointer}/data", "is not base64") from None
        return InlineTensor.carrying(self.spec(), data)


class InlineSourceBody(Body):
    """All of it within the engine's limit for one message, and the gateway's for one body."""

    tensors: Annotated[
        tuple[InlineTensorBody, ...],
        Field(min_length=1, max_length=65536),
        BeforeValidator(sequence),
    ]

    def source(self) -> InlineWeights:
        pointer = "/source/tensors/inline/tensors"
        return InlineWeights(
            tuple(one.tensor(f"{pointer}/{index}") for index, one in enumerate(self.tensors))
        )


class TensorSourceBody(Body):
    """One of them."""

    shared_memory: SharedMemorySourceBody | None = None
    inline: InlineSourceBody | None = None

    def source(self) -> WeightSource:
        match [one for one in (self.shared_memory, self.inline) if one is not None]:
            case [one]:
                return one.source()
            case _:
                raise fault("/source/tensors", "say shared_memory, or inline")


class DistributedSourceBody(Body):
    """A process group of a trainer's. The engine's rank r joins it as `rank_offset` + r."""

    backend: Annotated[CollectiveBackend, Field(strict=False)]
    address: Address = Field(description="Within what the engine allows.")
    port: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=2, le=65536)] = Field(
        description="Trainer and engine ranks together."
    )
    rank_offset: GroupRank
    group: TensorName
    source_rank: GroupRank = Field(0, description="The one that sends.")
    tensors: Annotated[
        tuple[TensorSpecBody, ...],
        Field(min_length=1, max_length=65536),
        BeforeValidator(sequence),
    ] = Field(description="In the order in which they are sent.")

    def source(self) -> DistributedWeights:
        return DistributedWeights(
            backend=self.backend,
            address=self.address,
            port=self.port,
            world_size=self.world_size,
            rank_offset=self.rank_offset,
            group=self.group,
            source_rank=self.source_rank,
            tensors=tuple(one.spec() for one in self.tensors),
        )


class WeightSourceBody(Body):
    """One of them."""

    disk: DiskSourceBody | None = None
    tensors: TensorSourceBody | None = None
    distributed: DistributedSourceBody | None = None
    session: SessionSourceBody | None = None

    def source(self) -> WeightSource:
        named = (self.disk, self.tensors, self.distributed, self.session)
        match [one for one in named if one is not None]:
            case [one]:
                return one.source()
            case _:
                raise fault("/source", "name one source: disk, tensors, distributed or session")


_SAID_BY_BEGIN = frozenset(
    {
        "weight_version",
        "cache_policy",
        "components",
        "pause",
        "under_pause",
        "check_finite",
        "deadline_ms",
        "override_freeze",
    }
)


class PauseAroundBody(Body):
    mode: Annotated[PauseMode, Field(strict=False)]
    new_requests: Annotated[NewRequests, Field(strict=False)] = NewRequests.HOLD
    hold_limit_ms: Milliseconds | None = None


class UnderPauseBody(Body):
    pause_epoch: Epoch | None = Field(
        None, description="Refused unless it is the latest pause; absent: whichever is in force."
    )


class SetWeightVersionBody(OrderBody):
    weight_version: WeightVersion = Field(description="What the weights are called from now on.")

    def command(self) -> Command:
        return SetWeightVersion(model=self.model, weight_version=self.weight_version)


class UpdateWeightsBody(OrderBody):
    """Either `pause`, or `under_pause` where the engine is paused already. A later call of a
    session says `source` alone."""

    source: WeightSourceBody
    weight_version: WeightVersion | None = Field(
        None,
        description="Needed. The engine's when, and only when, the update has succeeded.",
    )
    cache_policy: Annotated[CachePolicy, Field(strict=False)] = Field(
        CachePolicy.FLUSH, description="What becomes of KV that the earlier weights computed."
    )
    components: Annotated[
        tuple[Annotated[Component, Field(strict=False)], ...],
        Field(min_length=1, max_length=8),
        BeforeValidator(sequence),
    ] = (Component.TARGET,)
    pause: Annotated[PauseMode, Field(strict=False)] | PauseAroundBody | None = Field(
        None,
        description="Pause in this mode for the exchange, and lift that pause, and no other, "
        "once weights are valid.",
    )
    under_pause: UnderPauseBody | None = Field(
        None, description="The engine is paused already; nothing is paused or resumed."
    )
    check_finite: bool = Field(False, description="Refuse NaN and infinity before the exchange.")

    def stage(self) -> SessionStage | None:
        """Of a session that goes on; None: it is an order of its own."""
        session = self.source.session
        stage = None if session is None else session.stage()
        if stage is not None:
            for name in sorted(self.model_fields_set & _SAID_BY_BEGIN):
                raise fault(f"/{name}", "is said when the session begins, and not again")
            if self.source.model_fields_set != {"session"}:
                raise fault("/source", "name one source")
        return stage

    def command(self) -> Command:
        if self.weight_version is None:
            raise fault("/weight_version", "must be there")
        return UpdateWeights(
            model=self.model,
            source=self.source.source(),
            weight_version=self.weight_version,
            cache_policy=self.cache_policy,
            components=self.components,
            admission=self._admission(),
            check_finite=self.check_finite,
        )

    def _admission(self) -> AdmissionRule:
        match self.pause, self.under_pause:
            case None, UnderPauseBody(pause_epoch=epoch):
                return UnderPause(epoch)
            case PauseMode() as mode, None:
                return PauseAround(mode)
            case PauseAroundBody() as around, None:
                return PauseAround(around.mode, around.new_requests, around.hold_limit_ms)
            case _:
                raise fault("/pause", "say pause, or under_pause")
