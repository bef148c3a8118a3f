"""`vllm.Control` over the kit's desk: what speaks to vLLM's front end can speak to this engine.

Calls without keys, epochs or events become orders of the engine's own, so that they count like any
other. Where vLLM does harm (weights exchanged under traffic, a resume in sleep, sleeping twice) the
desk's refusal is what the caller gets. There is no authentication, as there is none in vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from app.domain.capabilities import Capabilities
from app.domain.commands import (
    Command,
    FlushCaches,
    LoadLora,
    Pause,
    ReleaseResources,
    RestoreResources,
    Resume,
    SetWeightVersion,
    UnloadLora,
)
from app.domain.errors import FailedPrecondition, InvalidArgument, UnsupportedOperation
from app.domain.facts import EngineFacts
from app.domain.kinds import (
    Admission,
    CacheKind,
    ContentPolicy,
    DrainRule,
    OperationKind,
    OperationState,
    PauseMode,
    ResourceKind,
    WeightSourceKind,
)
from app.domain.operation import Operation
from app.enginekit.auth import ANYONE
from app.enginekit.desk import OrderDesk
from app.enginekit.refusals import EngineNotAnswering, OrderDidNotSucceed, answering
from app.enginekit.runtime import Feature, Runtime
from app.enginekit.state import EngineState
from app.enginekit.vllm_transfer import DiskTransfer
from app.rpc.vllm import control_pb2 as pb
from app.rpc.vllm import control_pb2_grpc

_K = OperationKind
_MODES = {
    pb.PAUSE_MODE_UNSPECIFIED: PauseMode.ABORT,
    pb.PAUSE_MODE_ABORT: PauseMode.ABORT,
    pb.PAUSE_MODE_WAIT: PauseMode.DRAIN,
    pb.PAUSE_MODE_KEEP: PauseMode.KEEP,
}
_ABORTED = "aborted by an administrator"
_TAGS = {"weights": ResourceKind.WEIGHTS, "kv_cache": ResourceKind.KV_CACHE}
_SCHEDULING = "scheduling"


class NotConfigured(FailedPrecondition):
    """A part of vLLM's service that this engine was not started with."""

    reason = "NOT_CONFIGURED"


class VllmControlService(control_pb2_grpc.ControlServicer):
    """As in vLLM, calls of the reinforcement-learning part that change something wait for each
    other; a caller who goes away lets the next one in, and what it ordered goes on."""

    def __init__(
        self,
        runtime: Runtime,
        state: EngineState,
        desk: OrderDesk,
        *,
        capabilities: Callable[[], Capabilities],
        timeout_s: float,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._desk = desk
        self._capabilities = capabilities
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._transfer = DiskTransfer()

    # ---- discovery ----

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
        async with answering(context):
            engine = self._runtime.describe()
            can = self._capabilities()
            transfer = WeightSourceKind.DISK in can.weight_sources
            sizes = (
                engine.tensor_parallel_size,
                engine.pipeline_parallel_size,
                engine.data_parallel_size,
            )
            return pb.ServerInfo(
                engine_version=engine.version,
                api_version="vllm",
                instance_id=self._state.instance_id,
                parallelism=pb.ParallelismInfo(
                    tensor_parallel_size=sizes[0],
                    pipeline_parallel_size=sizes[1],
                    data_parallel_size=sizes[2],
                    world_size=sizes[0] * sizes[1] * sizes[2],
                    data_parallel_size_local=sizes[2],
                ),
                max_model_len=engine.max_context_length or 0,
                kv_block_size=engine.kv_block_size or 0,
                total_kv_blocks=engine.total_kv_blocks or 0,
                max_running_requests=engine.max_running_requests or 0,
                max_batched_tokens=engine.max_batched_tokens or 0,
                max_loras=engine.max_loras or 0,
                rl_capabilities=pb.RlCapabilities(
                    weight_transfer_enabled=transfer,
                    weight_transfer_backend="disk" if transfer else "",
                    sleep_mode_enabled=_K.RELEASE_RESOURCES in can.operations,
                ),
            )

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.ModelInfo:
        async with answering(context):
            engine = self._runtime.describe()
            return pb.ModelInfo(
                model_id=engine.models[0],
                served_model_name=engine.models[0],
                served_model_aliases=engine.models[1:],
                supports_text_input=True,
                supports_token_ids_input=True,
                supports_lora=Feature.LORA in engine.features,
                supports_multimodal=Feature.MEDIA in engine.features,
            )

    async def Shutdown(self, request: pb.ShutdownRequest, context: Any) -> pb.ShutdownResponse:
        async with answering(context):
            raise NotConfigured("this server does not manage the engine process")

    async def GetKvEventSources(
        self, request: pb.GetKvEventSourcesRequest, context: Any
    ) -> pb.GetKvEventSourcesResponse:
        async with answering(context):
            raise UnsupportedOperation("cache events are told by openengine.v1.Control alone")

    # ---- requests ----

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """OK whatever the ids were: the message has no room for more."""
        async with answering(context):
            ids = tuple(dict.fromkeys(request.request_ids))
            if not ids:
                return pb.AbortResponse()  # nothing: in this service, too, nobody aborts all
            self._state.gate.end_held(ids, _ABORTED)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._runtime.abort(ids, _ABORTED)
            except TimeoutError:
                raise EngineNotAnswering("the engine did not answer in time") from None
            return pb.AbortResponse()

    # ---- adapters ----

    async def LoadLora(self, request: pb.LoadLoraRequest, context: Any) -> pb.LoadLoraResponse:
        async with answering(context):
            self._offered(_K.LOAD_LORA, "LoRA")
            command = LoadLora(name=request.lora_name, path=request.source_path)
            return pb.LoadLoraResponse(adapter=_adapter(await self._carry(command)))

    async def UnloadLora(
        self, request: pb.UnloadLoraRequest, context: Any
    ) -> pb.UnloadLoraResponse:
        async with answering(context):
            self._offered(_K.UNLOAD_LORA, "LoRA")
            command = UnloadLora(name=request.lora_name)
            return pb.UnloadLoraResponse(adapter=_adapter(await self._carry(command)))

    async def ListLoras(self, request: pb.ListLorasRequest, context: Any) -> pb.ListLorasResponse:
        async with answering(context):
            self._offered(_K.LOAD_LORA, "LoRA")
            loras = sorted((await self._facts()).loras, key=lambda lora: lora.name)
            return pb.ListLorasResponse(
                adapters=[
                    pb.LoraAdapter(lora_id=lora.id, lora_name=lora.name, source_path=lora.path)
                    for lora in loras
                ]
            )

    # ---- pausing ----

    async def PauseGeneration(
        self, request: pb.PauseGenerationRequest, context: Any
    ) -> pb.PauseGenerationResponse:
        async with answering(context), self._turn:
            mode = _mode(request.mode)
            await self._carry(Pause(mode=mode))
            clear = not request.HasField("clear_cache") or request.clear_cache
            if clear and mode is not PauseMode.KEEP:
                await self._flush()
            return pb.PauseGenerationResponse()

    async def ResumeGeneration(
        self, request: pb.ResumeGenerationRequest, context: Any
    ) -> pb.ResumeGenerationResponse:
        async with answering(context), self._turn:
            await self._resume(await self._facts())
            return pb.ResumeGenerationResponse()

    async def IsPaused(self, request: pb.IsPausedRequest, context: Any) -> pb.IsPausedResponse:
        async with answering(context):
            paused = (await self._facts()).admission is Admission.PAUSED
            return pb.IsPausedResponse(paused=paused)

    # ---- sleep ----

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        """Level 0 pauses; 1 keeps the weights elsewhere; 2 gives them up."""
        async with answering(context), self._turn:
            self._offered(_K.RELEASE_RESOURCES, "sleep")
            level = request.level if request.HasField("level") else 1
            if level > 2:
                raise InvalidArgument("level: 0, 1 or 2")
            await self._carry(Pause(mode=_mode(request.mode)))
            wanted = {
                0: (),
                1: (
                    ((ResourceKind.KV_CACHE,), ContentPolicy.DISCARD),
                    ((ResourceKind.WEIGHTS,), ContentPolicy.PRESERVE),
                ),
                2: (((ResourceKind.KV_CACHE, ResourceKind.WEIGHTS), ContentPolicy.DISCARD),),
            }
            for resources, content in wanted[level]:
                await self._carry(
                    ReleaseResources(resources=resources, content=content, drain=DrainRule.WAIT)
                )
            return pb.SleepResponse()

    async def WakeUp(self, request: pb.WakeUpRequest, context: Any) -> pb.WakeUpResponse:
        """The last tag lifts the pause too, unless the weights have to come first."""
        async with answering(context), self._turn:
            self._offered(_K.RESTORE_RESOURCES, "sleep")
            if unknown := set(request.tags) - {*_TAGS, _SCHEDULING}:
                raise InvalidArgument(f"tags: {', '.join(sorted(unknown))}")
            facts = await self._facts()
            wanted = {_TAGS[tag] for tag in request.tags if tag in _TAGS}
            back = facts.released & wanted if request.tags else facts.released
            if back:
                await self._carry(
                    RestoreResources(
                        resources=tuple(sorted(back)), release_epoch=facts.release_epoch
                    )
                )
                facts = await self._facts()
            if not facts.released:
                await self._resume(facts)
            return pb.WakeUpResponse()

    async def IsSleeping(
        self, request: pb.IsSleepingRequest, context: Any
    ) -> pb.IsSleepingResponse:
        """True also of an engine that is only paused, as in vLLM."""
        async with answering(context):
            facts = await self._facts()
            sleeping = bool(facts.released) or facts.admission is Admission.PAUSED
            return pb.IsSleepingResponse(sleeping=sleeping)

    # ---- weights ----

    async def InitWeightTransferEngine(
        self, request: pb.InitWeightTransferEngineRequest, context: Any
    ) -> pb.InitWeightTransferEngineResponse:
        async with answering(context), self._turn:
            self._transferring()
            self._transfer.init(request.init_info_json)
            return pb.InitWeightTransferEngineResponse()

    async def StartWeightUpdate(
        self, request: pb.StartWeightUpdateRequest, context: Any
    ) -> pb.StartWeightUpdateResponse:
        async with answering(context), self._turn:
            self._transferring()
            self._transfer.start()
            return pb.StartWeightUpdateResponse()

    async def StartDraftWeightUpdate(
        self, request: pb.StartDraftWeightUpdateRequest, context: Any
    ) -> pb.StartDraftWeightUpdateResponse:
        async with answering(context):
            raise NotConfigured("this engine has no draft model")

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: Any
    ) -> pb.UpdateWeightsResponse:
        """Read and judged; the ranks hear of it with the finish."""
        async with answering(context), self._turn:
            self._transferring()
            self._transfer.receive(request.update_info_json)
            return pb.UpdateWeightsResponse()

    async def FinishWeightUpdate(
        self, request: pb.FinishWeightUpdateRequest, context: Any
    ) -> pb.FinishWeightUpdateResponse:
        """The update itself, on all ranks or on none, under a pause that is in force."""
        async with answering(context), self._turn:
            self._transferring()
            version = request.weight_version if request.HasField("weight_version") else None
            if version is not None and not version.strip():
                raise InvalidArgument("weight_version: must not be blank")
            current = (await self._facts()).weights.version or "default"
            command = self._transfer.finish(version or current)
            if command is not None:
                await self._carry(command)
            return pb.FinishWeightUpdateResponse()

    async def UpdateWeightVersion(
        self, request: pb.UpdateWeightVersionRequest, context: Any
    ) -> pb.UpdateWeightVersionResponse:
        async with answering(context), self._turn:
            if _K.SET_WEIGHT_VERSION not in self._capabilities().operations:
                raise UnsupportedOperation("this engine takes no label without weights")
            await self._carry(SetWeightVersion(weight_version=request.weight_version))
            return pb.UpdateWeightVersionResponse()

    async def GetWeightVersion(
        self, request: pb.GetWeightVersionRequest, context: Any
    ) -> pb.GetWeightVersionResponse:
        async with answering(context):
            version = (await self._facts()).weights.version
            return pb.GetWeightVersionResponse(weight_version=version or "default")

    # ---- the same for all ----

    async def _carry(self, command: Command) -> Operation:
        ended = await self._desk.carry(command, ANYONE)
        if ended.state is not OperationState.SUCCEEDED:
            raise OrderDidNotSucceed(ended)
        return ended

    async def _facts(self) -> EngineFacts:
        await self._state.refresh()
        return self._state.facts()

    async def _resume(self, facts: EngineFacts) -> None:
        if facts.pause is not None:
            await self._carry(Resume(pause_epoch=facts.pause_epoch))

    async def _flush(self) -> None:
        if CacheKind.PREFIX in self._capabilities().cache_kinds:
            await self._carry(FlushCaches(caches=(CacheKind.PREFIX,)))

    def _offered(self, kind: OperationKind, name: str) -> None:
        if kind not in self._capabilities().operations:
            raise NotConfigured(f"this engine was not started with {name}")

    def _transferring(self) -> None:
        if WeightSourceKind.DISK not in self._capabilities().weight_sources:
            raise NotConfigured("this engine takes no weights from disk")


def _mode(number: int) -> PauseMode:
    if number not in _MODES:
        raise InvalidArgument("mode: invalid pause mode")
    return _MODES[pb.PauseMode.ValueType(number)]


def _adapter(ended: Operation) -> pb.LoraAdapter:
    lora: Any = (ended.result or {})["lora"]
    return pb.LoraAdapter(lora_id=lora["id"], lora_name=lora["name"], source_path=lora["path"])
