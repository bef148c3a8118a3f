"""An engine of several ranks that can be broken, with its clients and the versions it may serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from itertools import count
from pathlib import Path
from uuid import uuid4

import grpc
import pytest
import torch
from safetensors.torch import load_file

from app.reference_engine import messages as m
from app.reference_engine.assembly import build_rank
from app.reference_engine.limits import CoreSettings
from app.reference_engine.serving import EngineSettings, Pace, served
from app.reference_engine.tiny_adapter import write_tiny_adapter
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import generation_pb2, lora_pb2
from tests.reference_engine.calling import Call, Clients, Told, clients_of
from tests.reference_engine.ranks import alive, nursery
from tests.reference_engine.serving import PATIENCE_S, PROMPT, eventually
from tests.robustness.breaking_rank import FOLDER, MODULE, Faults

FILE = "model.safetensors"
# Long enough to be met by an order, short enough for a drain.
TOKENS = 40
OPEN = pb.ADMISSION_STATE_OPEN
VALID = pb.WEIGHTS_STATE_VALID
_DTYPES = {torch.float32: pb.TENSOR_DTYPE_FLOAT32, torch.bfloat16: pb.TENSOR_DTYPE_BFLOAT16}


@cache
def fresh(checkpoint: Path, count: int, after: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The first tokens that a fresh engine on that checkpoint says, one rank, here in this process;
    ``after`` has tokens that follow the prompt already."""
    built = build_rank(checkpoint, CoreSettings(torch_threads=1, kv_blocks=64))
    core = built.core(CoreSettings())
    core.apply(
        m.Submit(
            m.GenerationRequest(
                request_id="fresh",
                prompt_ids=(*built.tokenizer.encode(PROMPT), *after),
                sampling=m.Sampling(temperature=0.0),
                stopping=m.Stopping(max_tokens=count, ignore_eos=True),
            )
        )
    )
    found: list[int] = []
    while core.runnable:
        for report in core.step():
            if isinstance(report, m.Tokens):
                found += [token.token_id for token in report.tokens]
    return tuple(found)


class Stage:
    """``versions``: checkpoints by the name that their weights get; the first is served first."""

    def __init__(
        self, settings: EngineSettings, faults: Faults, versions: Mapping[str, Path], adapter: Path
    ) -> None:
        self._settings = settings
        self.adapter = adapter
        self.faults = faults
        self.versions = versions
        self.ranks = range(settings.core.tensor_parallel_size)
        self.clients: Clients
        self.sound = True  # set by tests: left as it was found
        self._stack = AsyncExitStack()
        self._limits = count(17)
        self._segments: dict[str, pb.SharedMemoryWeights] = {}

    async def start(self) -> None:
        engine = await self._stack.enter_async_context(served(self._settings))
        self.clients = await self._stack.enter_async_context(clients_of(engine))

    async def start_again(self) -> None:
        """The engine as a whole, with what its store remembers."""
        await self._stack.aclose()
        for rank in self.ranks:
            self.faults.disarm(rank)
        await self.start()

    async def close(self) -> None:
        await self._stack.aclose()
        for segment in self._segments.values():
            (Path("/dev/shm") / segment.object_name).unlink()

    def ask(self, count: int = TOKENS) -> Call:
        """A greedy generation of exactly so many tokens."""
        request = generation_pb2.GenerateRequest(request_id=uuid4().hex, prompt=PROMPT)
        request.sampling.temperature = 0.0
        request.stopping.max_tokens = count
        request.stopping.ignore_eos = True
        return self.clients.send(request)

    def expected(self, version: str, count: int = TOKENS) -> list[int]:
        return list(fresh(self.versions[version], count))

    async def version(self) -> str:
        return str((await self.clients.profile()).state.weights.version)

    async def other_version(self) -> str:
        now = await self.version()
        return next(name for name in self.versions if name != now)

    def disk(self, version: str) -> pb.DiskWeights:
        return pb.DiskWeights(path=str(self.versions[version]))

    def shared(self, version: str) -> pb.TensorWeights:
        if version not in self._segments:
            self._segments[version] = _segment(self.versions[version])
        return pb.TensorWeights(shared_memory=self._segments[version])

    def restore(self, *kinds: pb.ResourceKind.ValueType, epoch: int) -> Told:
        request = pb.RestoreResourcesRequest(
            idempotency_key=uuid4().hex, resources=kinds, release_epoch=epoch
        )
        return Told(self.clients.admin.RestoreResources(request, timeout=PATIENCE_S))

    async def serves(self, version: str) -> bool:
        """Whether it says what a fresh engine of that version says."""
        heard = await self.ask().whole()
        return heard.finished is not None and heard.ids == self.expected(version)

    async def bring_back(self, version: str, broken_pid: int) -> None:
        """From whatever state, by a full update. ``broken_pid``: the rank's process that was killed
        or stopped; the engine itself has to find that out."""

        async def gone() -> bool:
            return not alive(broken_pid)

        await eventually(gone)

        async def updated() -> bool:
            try:
                return await self._update_fully(version)
            except grpc.aio.AioRpcError:
                return False  # not ready for an order yet

        await eventually(updated)

    async def leave_as_found(self) -> None:
        """Open, and without adapters."""
        state = (await self.clients.profile()).state
        if state.admission != OPEN:
            await self.clients.resume()
        for lora in state.loras:
            await self.unload(lora.lora_name)

    def another_limit(self) -> int:
        """Of running requests; another one each time."""
        return next(self._limits)

    async def load(self, name: str) -> None:
        """Raises AioRpcError."""
        wanted = lora_pb2.LoraAdapter(lora_name=name, source_path=str(self.adapter))
        request = lora_pb2.LoadLoraRequest(adapter=wanted)
        await self.clients.control.LoadLora(request, timeout=PATIENCE_S)

    async def unload(self, name: str) -> None:
        """Raises AioRpcError."""
        request = lora_pb2.UnloadLoraRequest(lora_name=name)
        await self.clients.control.UnloadLora(request, timeout=PATIENCE_S)

    async def _update_fully(self, version: str) -> bool:
        profile = await self.clients.profile()
        state, epoch = profile.state, profile.release_epoch
        if state.released and not await _completes(self.restore(*state.released, epoch=epoch)):
            return False
        admission = {} if state.admission == OPEN else {"under_pause": pb.UnderPause()}
        told = self.clients.update(version, disk=self.disk(version), **admission)
        return await _completes(told)


async def _completes(told: Told) -> bool:
    return (await told.end()).WhichOneof("event") == "completed"


def _segment(checkpoint: Path) -> pb.SharedMemoryWeights:
    name = f"chadburn-{uuid4().hex}"
    placed, content = [], b""
    for key, tensor in load_file(checkpoint / FILE).items():
        spec = pb.TensorSpec(name=key, dtype=_DTYPES[tensor.dtype], shape=list(tensor.shape))
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        placed.append(
            pb.SharedMemoryTensor(spec=spec, offset_bytes=len(content), length_bytes=len(data))
        )
        content += data
    path = Path("/dev/shm") / name
    path.touch(0o600)
    path.write_bytes(content)
    return pb.SharedMemoryWeights(object_name=name, size_bytes=len(content), tensors=placed)


@asynccontextmanager
async def stage(
    folder: Path,
    versions: Mapping[str, Path],
    *,
    ranks: int,
    rank_timeout_s: float,
    max_running: int = 16,
) -> AsyncIterator[Stage]:
    """For the time of the block. A rank that says nothing for ``rank_timeout_s`` counts as lost."""
    faults = folder / "faults"
    faults.mkdir(parents=True)
    first = next(iter(versions))
    settings = EngineSettings(
        data_dir=folder / "engine",
        checkpoint=versions[first],
        weight_version=first,
        weights_roots=tuple(versions.values()),
        insecure_loopback=True,
        lora_roots=(folder,),
        rank_timeout_s=rank_timeout_s,
        recovery=Pace(calm_s=0.0),  # every loss here is one that was asked for
        nursery=nursery(MODULE),
        core=CoreSettings(
            torch_threads=1,
            step_delay_ms=2,
            kv_blocks=64,
            max_running=max_running,
            tensor_parallel_size=ranks,
        ),
        stop_grace_s=0.0,
    )
    adapter = write_tiny_adapter(versions[first], folder / "adapter")
    made = Stage(settings, Faults(faults), versions, adapter)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(FOLDER, str(faults))  # the ranks inherit it
        try:
            await made.start()
            yield made
        finally:
            await made.close()
