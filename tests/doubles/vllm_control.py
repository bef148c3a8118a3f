# ruff: noqa: N802 (the names are the wire's)
"""`vllm.Control` on a real socket, behaving as vLLM 0.32 and 0.33 were seen to: also where that
does harm, so that a test can show what an order would have done.

What it leaves out is the model: a request is one of `running` until `finish` ends it, and
`generate` says what a new one would meet.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import grpc

from app.rpc.vllm import control_pb2 as pb
from app.rpc.vllm import control_pb2_grpc

C = grpc.StatusCode
_INSTANCES = count(1_795_979_674)
NO_SLEEP = "sleep mode is not configured; start vLLM with --enable-sleep-mode"
NO_TRANSFER = "weight transfer is not configured; start vLLM with --weight-transfer-config"
NO_LORA = "engine was not started with LoRA enabled"


class EngineDied(Exception):
    """The engine process ended: a request met what it cannot run on."""


class VllmControl(control_pb2_grpc.ControlServicer):
    """`missing`: RPCs it does not have. `fails`: code and text of the next calls of an RPC.
    `hangs`: RPCs that never answer, until their event is set; `stalls`: the same, once they are
    carried out. `loses`: RPCs that are carried out and whose reply does not come. `calls`: what was
    called, with its message, in order."""

    def __init__(self, *, rank: int = 0, replicas: int = 1, version: str = "0.32.0") -> None:
        self.rank, self.replicas, self.version = rank, replicas, version
        self.sleep_mode = True
        self.transfer = "nccl"
        self.draft = False
        self.lora = True
        self.max_loras = 2
        self.manages_engine = True
        self.missing: set[str] = set()
        self.fails: dict[str, list[tuple[C, str]]] = {}
        self.hangs: dict[str, asyncio.Event] = {}
        self.stalls: dict[str, asyncio.Event] = {}
        self.loses: set[str] = set()
        self.calls: list[tuple[str, Any]] = []
        self.stopped = asyncio.Event()
        self.bad_payloads: set[str] = set()
        self.start()

    def start(self) -> None:
        """A new process, with the weights it was started with."""
        self.instance_id = str(next(_INSTANCES))
        self.dead = False
        self.paused = False
        self.mode = pb.PAUSE_MODE_ABORT
        self.running: set[str] = set()
        self.asleep: set[str] = set()
        self.discarded = False
        self.initialised = False
        self.session = False
        self.weights = "old"  # or "half": started and not finished; "new"
        self.weight_version = "default"
        self.loras: dict[str, pb.LoraAdapter] = {}
        self.evicted: set[str] = set()
        self.cleared: list[str] = []
        self._lock = asyncio.Lock()
        self._left = asyncio.Event()

    # ---- what a test does to it ----

    def named(self, rpc: str) -> list[Any]:
        return [message for name, message in self.calls if name == rpc]

    @property
    def orders(self) -> list[str]:
        """The calls that change something, in order."""
        return [name for name, _ in self.calls if not name.startswith(("Get", "Is", "List"))]

    def finish(self) -> None:
        """What runs comes to its end."""
        if not (self.paused and self.mode == pb.PAUSE_MODE_KEEP):
            self.running.clear()
            self._left.set()

    def generate(self) -> str:
        """What one more request meets: `tokens`, `hangs` or `refused`. Raises EngineDied."""
        if self.paused:
            refuses = self.version >= "0.33" and self.mode != pb.PAUSE_MODE_KEEP
            return "refused" if refuses else "hangs"
        if self.weights == "half" or self.discarded or "weights" in self.asleep:
            self.dead = True
            raise EngineDied
        return "tokens"

    # ---- how a call goes ----

    async def _call(
        self,
        rpc: str,
        request: Any,
        context: Any,
        act: Callable[[], Awaitable[Any]],
        *,
        locked: bool = False,
        engine: bool = True,
    ) -> Any:
        self.calls.append((rpc, request))
        if rpc in self.missing:
            await context.abort(C.UNIMPLEMENTED, "")
        if (hanging := self.hangs.get(rpc)) is not None:
            await hanging.wait()
        if self.fails.get(rpc):
            code, text = self.fails[rpc].pop(0)
            await context.abort(code, text)
        if engine and self.dead:
            await context.abort(C.INTERNAL, "EngineCore encountered an issue")
        try:
            if locked:
                # A client that gives up lets go of the lock, and undoes nothing.
                async with self._lock:
                    answer = await act()
            else:
                answer = await act()
        except _Said as said:
            await context.abort(said.code, said.text)
        if (stalling := self.stalls.get(rpc)) is not None:
            await stalling.wait()
        if rpc in self.loses:
            self.loses.discard(rpc)
            await context.abort(C.UNAVAILABLE, "Socket closed")
        return answer

    # ---- reads ----

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        async def act() -> pb.ServerInfo:
            return pb.ServerInfo(
                engine_version=self.version,
                api_version="vllm",
                instance_id=self.instance_id,
                parallelism=pb.ParallelismInfo(
                    tensor_parallel_size=1,
                    pipeline_parallel_size=1,
                    data_parallel_size=self.replicas,
                    data_parallel_rank=self.rank,
                    data_parallel_size_local=1,
                    world_size=1,
                ),
                max_model_len=2048,
                kv_block_size=16,
                total_kv_blocks=4096,
                max_running_requests=8,
                max_batched_tokens=2048,
                max_loras=self.max_loras if self.lora else 0,
                rl_capabilities=pb.RlCapabilities(
                    weight_transfer_enabled=bool(self.transfer),
                    weight_transfer_backend=self.transfer,
                    sleep_mode_enabled=self.sleep_mode,
                    draft_weight_updates_enabled=self.draft,
                ),
            )

        return await self._call("GetServerInfo", request, context, act, engine=False)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        async def act() -> pb.ModelInfo:
            return pb.ModelInfo(
                model_id="/models/tiny",
                served_model_name="tiny",
                served_model_aliases=["tiny-alias"],
                supports_text_input=True,
                supports_token_ids_input=True,
                supports_lora=self.lora,
            )

        return await self._call("GetModelInfo", request, context, act, engine=False)

    async def IsPaused(self, request: Any, context: Any) -> Any:
        async def act() -> pb.IsPausedResponse:
            return pb.IsPausedResponse(paused=self.paused)

        return await self._call("IsPaused", request, context, act)

    async def IsSleeping(self, request: Any, context: Any) -> Any:
        async def act() -> pb.IsSleepingResponse:
            return pb.IsSleepingResponse(sleeping=self.paused or bool(self.asleep))

        return await self._call("IsSleeping", request, context, act)

    async def GetWeightVersion(self, request: Any, context: Any) -> Any:
        async def act() -> pb.GetWeightVersionResponse:
            return pb.GetWeightVersionResponse(weight_version=self.weight_version)

        return await self._call("GetWeightVersion", request, context, act)

    async def GetKvEventSources(self, request: Any, context: Any) -> Any:
        async def act() -> pb.GetKvEventSourcesResponse:
            source = pb.KvEventSource(
                transport="zmq",
                endpoint=f"tcp://127.0.0.1:{5557 + self.rank}",
                topic="kv-events",
                encoding="msgpack",
                schema_version=1,
            )
            return pb.GetKvEventSourcesResponse(sources=[source])

        return await self._call("GetKvEventSources", request, context, act, engine=False)

    async def ListLoras(self, request: Any, context: Any) -> Any:
        async def act() -> pb.ListLorasResponse:
            self._need(self.lora, NO_LORA)
            return pb.ListLorasResponse(adapters=[self.loras[name] for name in sorted(self.loras)])

        return await self._call("ListLoras", request, context, act)

    # ---- requests, adapters, the end ----

    async def Abort(self, request: Any, context: Any) -> Any:
        async def act() -> pb.AbortResponse:
            self.running -= set(request.request_ids)
            if not self.running:
                self._left.set()
            return pb.AbortResponse()

        return await self._call("Abort", request, context, act)

    async def LoadLora(self, request: Any, context: Any) -> Any:
        async def act() -> pb.LoadLoraResponse:
            self._need(self.lora, NO_LORA)
            if not request.lora_name or not request.source_path.startswith("/"):
                raise _Said(C.INVALID_ARGUMENT, "lora_path must be absolute")
            if request.lora_name in (*self.loras, "tiny", "tiny-alias"):
                raise _Said(C.ALREADY_EXISTS, f"`{request.lora_name}` is already loaded")
            if len(self.loras) - len(self.evicted) >= self.max_loras:
                # Another one is pushed out without a word, and stays in the list.
                self.evicted.add(next(name for name in self.loras if name not in self.evicted))
            adapter = pb.LoraAdapter(
                lora_id=len(self.loras) + 1,
                lora_name=request.lora_name,
                source_path=request.source_path,
            )
            self.loras[request.lora_name] = adapter
            return pb.LoadLoraResponse(adapter=adapter)

        return await self._call("LoadLora", request, context, act)

    async def UnloadLora(self, request: Any, context: Any) -> Any:
        async def act() -> pb.UnloadLoraResponse:
            self._need(self.lora, NO_LORA)
            if request.lora_name not in self.loras:
                raise _Said(C.NOT_FOUND, f"LoRA adapter `{request.lora_name}` is not loaded")
            if request.lora_name in self.evicted:
                raise _Said(C.INTERNAL, "engine rejected removal")
            return pb.UnloadLoraResponse(adapter=self.loras.pop(request.lora_name))

        return await self._call("UnloadLora", request, context, act)

    async def Shutdown(self, request: Any, context: Any) -> Any:
        async def act() -> pb.ShutdownResponse:
            self._need(self.manages_engine, "this server does not manage the engine process")
            self.stopped.set()
            return pb.ShutdownResponse()

        return await self._call("Shutdown", request, context, act, engine=False)

    # ---- admission and memory ----

    async def PauseGeneration(self, request: Any, context: Any) -> Any:
        async def act() -> pb.PauseGenerationResponse:
            mode = request.mode or pb.PAUSE_MODE_ABORT
            await self._pause(mode)
            if request.clear_cache or not request.HasField("clear_cache"):
                self.cleared.append("pause")
            return pb.PauseGenerationResponse()

        return await self._call("PauseGeneration", request, context, act, locked=True)

    async def _pause(self, mode: Any) -> None:
        frozen = self.paused and self.mode == pb.PAUSE_MODE_KEEP
        self.paused, self.mode = True, mode
        if mode == pb.PAUSE_MODE_ABORT:
            self.running.clear()
        elif mode == pb.PAUSE_MODE_WAIT and not frozen:
            # After a keep it says at once that it has drained; nothing has.
            while self.running:
                self._left.clear()
                await self._left.wait()
        elif frozen:
            self.mode = pb.PAUSE_MODE_KEEP

    async def ResumeGeneration(self, request: Any, context: Any) -> Any:
        async def act() -> pb.ResumeGenerationResponse:
            self.paused = False
            if self.running and (self.asleep or self.weights == "half"):
                self.dead = True
            return pb.ResumeGenerationResponse()

        return await self._call("ResumeGeneration", request, context, act, locked=True)

    async def Sleep(self, request: Any, context: Any) -> Any:
        async def act() -> pb.SleepResponse:
            self._need(self.sleep_mode, NO_SLEEP)
            await self._pause(request.mode or pb.PAUSE_MODE_ABORT)
            if not self.asleep:  # else whatever the level, nothing more is done
                level = request.level if request.HasField("level") else 1
                self.asleep = {"weights", "kv_cache"} if level else set()
                self.discarded = level == 2
            return pb.SleepResponse()

        return await self._call("Sleep", request, context, act, locked=True)

    async def WakeUp(self, request: Any, context: Any) -> Any:
        async def act() -> pb.WakeUpResponse:
            self._need(self.sleep_mode, NO_SLEEP)
            self.asleep -= set(request.tags or ("weights", "kv_cache"))
            if not self.asleep:
                self.paused = False
            return pb.WakeUpResponse()

        return await self._call("WakeUp", request, context, act, locked=True)

    # ---- weights ----

    async def InitWeightTransferEngine(self, request: Any, context: Any) -> Any:
        async def act() -> pb.InitWeightTransferEngineResponse:
            self._need(bool(self.transfer), NO_TRANSFER)
            self._object(request.init_info_json)
            self.initialised = True
            return pb.InitWeightTransferEngineResponse()

        return await self._call("InitWeightTransferEngine", request, context, act, locked=True)

    async def StartWeightUpdate(self, request: Any, context: Any) -> Any:
        async def act() -> pb.StartWeightUpdateResponse:
            self._start()
            return pb.StartWeightUpdateResponse()

        return await self._call("StartWeightUpdate", request, context, act, locked=True)

    async def StartDraftWeightUpdate(self, request: Any, context: Any) -> Any:
        async def act() -> pb.StartDraftWeightUpdateResponse:
            self._need(self.draft, "draft weight updates require a speculative draft model")
            self._start()
            return pb.StartDraftWeightUpdateResponse()

        return await self._call("StartDraftWeightUpdate", request, context, act, locked=True)

    def _start(self) -> None:
        self._need(bool(self.transfer), NO_TRANSFER)
        if self.session:
            raise _Said(C.INTERNAL, "start_weight_update called while one is already active")
        if "weights" in self.asleep:
            self.dead = True
            raise _Said(C.INTERNAL, "segmentation fault")
        self.session, self.weights = True, "half"
        if self.running and not self.paused:
            self.dead = True  # the next step meets tensors without content

    async def UpdateWeights(self, request: Any, context: Any) -> Any:
        async def act() -> pb.UpdateWeightsResponse:
            info = self._object(request.update_info_json)
            if not self.session:
                raise _Said(C.INTERNAL, "start_weight_update must be called before")
            if not self.initialised or self.bad_payloads & {str(info.get("path"))}:
                self.session = False  # an error closes it
                raise _Said(C.INTERNAL, "Worker failed")
            return pb.UpdateWeightsResponse()

        return await self._call("UpdateWeights", request, context, act, locked=True)

    async def FinishWeightUpdate(self, request: Any, context: Any) -> Any:
        async def act() -> pb.FinishWeightUpdateResponse:
            if request.HasField("weight_version") and not request.weight_version.strip():
                raise _Said(C.INVALID_ARGUMENT, "weight_version must not be empty")
            if not self.session:
                raise _Said(C.INTERNAL, "finish_weight_update called without a matching start")
            whole = bool(self.named("UpdateWeights"))
            self.session, self.discarded = False, self.discarded and not whole
            self.weights = "new" if whole else "half"
            if request.HasField("weight_version"):
                self.weight_version = request.weight_version
            return pb.FinishWeightUpdateResponse()

        return await self._call("FinishWeightUpdate", request, context, act, locked=True)

    async def UpdateWeightVersion(self, request: Any, context: Any) -> Any:
        async def act() -> pb.UpdateWeightVersionResponse:
            if not request.weight_version.strip():
                raise _Said(C.INVALID_ARGUMENT, "weight_version must not be empty")
            self.weight_version = request.weight_version
            return pb.UpdateWeightVersionResponse()

        return await self._call("UpdateWeightVersion", request, context, act, locked=True)

    def _object(self, payload: bytes) -> dict[str, Any]:
        try:
            info = json.loads(payload)
        except ValueError:
            raise _Said(C.INVALID_ARGUMENT, "must contain valid JSON") from None
        if not isinstance(info, dict):
            raise _Said(C.INVALID_ARGUMENT, "must contain a JSON object")
        return info

    def _need(self, there: bool, text: str) -> None:
        if not there:
            raise _Said(C.FAILED_PRECONDITION, text)


class _Said(Exception):
    def __init__(self, code: C, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class RunningControl:
    """A double and its listener, which can go and come back on the same port."""

    def __init__(self, control: VllmControl) -> None:
        self.control = control
        self.port = 0
        self._server: Any = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def listen(self) -> None:
        self._server = grpc.aio.server()
        control_pb2_grpc.add_ControlServicer_to_server(self.control, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        self.control.stopped.clear()
        self._watching = asyncio.create_task(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self.control.stopped.wait()
        server, self._server = self._server, None
        await server.stop(0.2)

    async def leave(self) -> None:
        """The process is gone, with whatever calls it had."""
        if self._watching is not None:
            self._watching.cancel()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def restart(self) -> None:
        await self.leave()
        self.control.start()
        await self.listen()


@asynccontextmanager
async def running_controls(
    members: int = 1, *, version: str = "0.32.0"
) -> AsyncIterator[list[RunningControl]]:
    running = []
    for rank in range(members):
        control = VllmControl(rank=rank, replicas=members, version=version)
        running.append(RunningControl(control))
    for one in running:
        await one.listen()
    try:
        yield running
    finally:
        for one in running:
            await one.leave()
