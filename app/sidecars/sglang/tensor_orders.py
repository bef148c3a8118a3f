"""New weights as tensors that come with the order, or lie in shared memory of this machine.

A payload is written here and sent once: no call of an update is ever repeated, whatever its answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from app.domain.commands import UpdateWeights
from app.domain.operation import Progress
from app.domain.tensors import TensorSpec
from app.domain.weight_sources import InlineWeights, SharedMemoryWeights
from app.enginekit.runtime import Order, RuntimeFault
from app.enginekit.tensor_names import SAFETENSORS
from app.sidecars.checkpoints import specs_fit
from app.sidecars.safetensors import BadWeights, infinite
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.sglang.payloads import DTYPES, Named, batches, payload_of
from app.sidecars.sglang.weight_orders import Updating, unfit

SHARED = Path("/dev/shm")  # noqa: S108 - where the system has its shared memory
PREFIX = "chadburn-"
# Of one call; each rank of the engine gets all of it, in base64.
_BATCH_BYTES = 32 << 20


class CarriedTensors(Updating):
    def __init__(
        self,
        order: Order,
        command: UpdateWeights,
        engine: SglangEngine,
        source: InlineWeights | SharedMemoryWeights,
    ) -> None:
        super().__init__(order, command, engine)
        self._source = source
        self._tensors: list[Named] = []

    async def prepare(self) -> None:
        await super().prepare()
        try:
            self._tensors = await asyncio.to_thread(self._read)
        except BadWeights as error:
            raise unfit(error) from error
        self.size_bytes = sum(len(content) for _, content in self._tensors)

    def _read(self) -> list[Named]:
        """Blocks on the disk. Raises BadWeights, RuntimeFault."""
        source = self._source
        specs = [one.spec for one in source.tensors]
        check_dtypes(specs)
        specs_fit(specs, self.model, whole=self.order.replace_all)
        tensors = _inline(source) if isinstance(source, InlineWeights) else _shared(source)
        if self.command.check_finite:
            for spec, content in tensors:
                if infinite(content, SAFETENSORS[spec.dtype]):
                    raise BadWeights(f"{spec.name} holds something that is no finite number")
        return tensors

    async def commit(self) -> None:
        await self.closed()
        await self.begin()
        parts = list(batches(self._tensors, _BATCH_BYTES))
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            payload = await asyncio.to_thread(payload_of, part)
            body: dict[str, object] = {
                "serialized_named_tensors": [payload] * self.engine.found.tensor_parallel_size,
                "selector": self.component.value,
                "flush_cache": last and self.flushes,
                "abort_all_requests": False,
            }
            if last:
                body["weight_version"] = self.command.weight_version
            await self.send("/update_weights_from_tensor", body)
            self.order.report(Progress("loading", number, len(parts), "pieces"))
        self._tensors = []
        await self.engine.end(within_s=self.left_s)
        await self.finish()


def check_dtypes(specs: Iterable[TensorSpec]) -> None:
    """Raises BadWeights."""
    for spec in specs:
        if spec.dtype not in DTYPES:
            raise BadWeights(f"{spec.dtype.value} is not taken as a tensor: send it by files")


def _inline(source: InlineWeights) -> list[Named]:
    found = []
    for one in source.tensors:
        if one.data is None:
            raise RuntimeFault("INTERNAL", "the order has lost its content")
        found.append((one.spec, one.data))
    return found


def _shared(source: SharedMemoryWeights) -> list[Named]:
    """Of an object of this user's, whose name says that it is meant for engines. Raises
    BadWeights."""
    if not source.object_name.startswith(PREFIX):
        raise BadWeights(f"names of shared memory begin with {PREFIX}")
    try:
        fd = os.open(SHARED / source.object_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            known = os.fstat(fd)
            if not stat.S_ISREG(known.st_mode) or known.st_uid != os.geteuid():
                raise BadWeights("the shared memory is somebody else's")
            content = file.read(source.size_bytes)
    except OSError as error:
        raise BadWeights("the shared memory cannot be read") from error
    if len(content) != source.size_bytes:
        raise BadWeights("the shared memory is smaller than was said")
    if source.sha256 is not None and hashlib.sha256(content).hexdigest() != source.sha256:
        raise BadWeights("the shared memory has another SHA-256 than was ordered")
    return [
        (one.spec, content[one.offset_bytes : one.offset_bytes + one.spec.size_bytes])
        for one in source.tensors
    ]
