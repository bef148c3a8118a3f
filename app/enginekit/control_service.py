"""`Control`: discovery, load, health and abort, as far as the listener allows."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar

from google.protobuf import struct_pb2

from app.domain.errors import FieldFault, InvalidArgument, UnsupportedOperation
from app.domain.kinds import AbortOutcome, Admission, WeightsState
from app.enginekit.adapter_calls import AdapterCalls
from app.enginekit.admission import AdmissionGate
from app.enginekit.auth import Callers
from app.enginekit.refusals import (
    AdminListenerOnly,
    EngineNotAnswering,
    Internal,
    RoleMismatch,
    UnknownKvSession,
    UnknownModel,
    UnknownRequest,
    UnsupportedFeature,
    answering,
)
from app.enginekit.relaying import closing, until
from app.enginekit.runtime import (
    EngineDescription,
    Feature,
    KvEventRuntime,
    KvSessionRuntime,
    Load,
    Runtime,
    RuntimeFault,
)
from app.enginekit.state import EngineState
from app.enginekit.vocabulary import ENGINE_ROLE
from app.enginekit.wire import nanos
from app.rpc.openengine.v1 import (
    error_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    openengine_pb2_grpc,
    server_pb2,
)

SCHEMA_RELEASE = "4def7c50"
SCHEMA_REVISION = 1

_RANKS_TOLD = 8
_ABORTED_BY_CALLER = "aborted by the caller"
_ABORTED_BY_ADMIN = "aborted by an administrator"
T = TypeVar("T")
_H = lifecycle_pb2.HealthState
_ABORT_STATUS = {
    AbortOutcome.ABORTED: lifecycle_pb2.AbortStatus.ABORT_STATUS_ABORTED,
    AbortOutcome.ALREADY_FINISHED: lifecycle_pb2.AbortStatus.ABORT_STATUS_ALREADY_FINISHED,
}


def _attributes(load: Load) -> struct_pb2.Struct | None:
    """What the contract's load has no field for: `memory`, a list of objects, one for each rank."""
    if not load.memory:
        return None
    attributes = struct_pb2.Struct()
    attributes["memory"] = [dataclasses.asdict(one) for one in load.memory]
    return attributes


class ControlService(openengine_pb2_grpc.ControlServicer):
    """`admin`: this is the admin listener, where nothing is kept back. `ending` is set when the
    engine stops: a subscription would never end by itself."""

    def __init__(
        self,
        runtime: Runtime,
        state: EngineState,
        callers: Callers,
        *,
        adapters: AdapterCalls,
        admin: bool,
        ending: asyncio.Event,
        now: Callable[[], datetime],
        timeout_s: float,
        probe_timeout_s: float,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._gate: AdmissionGate = state.gate
        self._callers = callers
        self._adapters = adapters
        self._admin = admin
        self._ending = ending
        self._now = now
        self._timeout_s = timeout_s
        self._probe_timeout_s = probe_timeout_s

    # ---- discovery and load ----

    async def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, context: Any
    ) -> server_pb2.ServerInfo:
        async with answering(context):
            engine = self._runtime.describe()
            extra = struct_pb2.Struct()
            extra.update({"openengine_admin": True})
            return server_pb2.ServerInfo(
                engine_name=engine.name,
                engine_version=engine.version,
                engine_role=ENGINE_ROLE.number(self._state.observation.role),
                instance_id=self._state.instance_id,
                supported_models=engine.models,
                parallelism=server_pb2.ParallelismInfo(
                    tensor_parallel_size=engine.tensor_parallel_size,
                    pipeline_parallel_size=engine.pipeline_parallel_size,
                    data_parallel_size=engine.data_parallel_size,
                ),
                kv_connector=self._kv_connector(),
                schema_revision=SCHEMA_REVISION,
                minimum_client_revision=SCHEMA_REVISION,
                schema_release=SCHEMA_RELEASE,
                capacity=server_pb2.DeploymentCapacity(
                    kv_block_size=engine.kv_block_size,
                    total_kv_blocks=engine.total_kv_blocks,
                    max_running_requests=engine.max_running_requests,
                    max_batched_tokens=engine.max_batched_tokens,
                    max_loras=engine.max_loras,
                ),
                extra=extra,
            )

    def _kv_connector(self) -> kv_pb2.KvConnectorInfo:
        if isinstance(self._runtime, KvSessionRuntime):
            return self._runtime.kv_connector()
        return kv_pb2.KvConnectorInfo(enabled=False)

    async def GetModelInfo(
        self, request: model_pb2.GetModelInfoRequest, context: Any
    ) -> model_pb2.ModelInfo:
        async with answering(context):
            engine = self._runtime.describe()
            model = request.model or engine.models[0]
            self._check_model(model, engine)
            return model_pb2.ModelInfo(
                model_id=model,
                served_model_name=model,
                max_context_length=engine.max_context_length,
                max_output_tokens=engine.max_output_tokens,
                supports_text_input=True,
                supports_token_ids_input=True,
                supports_lora=Feature.LORA in engine.features,
                supports_multimodal=Feature.MEDIA in engine.features,
                generation=_generation(engine),
            )

    async def GetLoad(
        self, request: server_pb2.GetLoadRequest, context: Any
    ) -> server_pb2.LoadInfo:
        async with answering(context):
            load = await self._ask(self._runtime.load(), self._timeout_s)
            return self._load_message(load, per_rank=request.include_per_rank)

    def _load_message(self, load: Load, *, per_rank: bool) -> server_pb2.LoadInfo:
        return server_pb2.LoadInfo(
            instance_id=self._state.instance_id,
            timestamp_unix_nanos=nanos(self._now()),
            running_requests=load.running_requests,
            queued_requests=load.queued_requests + self._gate.held,
            active_kv_sessions=load.active_kv_sessions,
            used_kv_blocks=load.used_kv_blocks,
            total_kv_blocks=load.total_kv_blocks,
            running_tokens=load.running_tokens,
            waiting_tokens=load.waiting_tokens,
            prefill_batch_size=load.prefill_batch_size,
            decode_batch_size=load.decode_batch_size,
            ranks=[
                server_pb2.RankLoadInfo(
                    data_parallel_rank=rank.data_parallel_rank,
                    running_requests=rank.running_requests,
                    queued_requests=rank.queued_requests,
                    used_kv_blocks=rank.used_kv_blocks,
                    total_kv_blocks=rank.total_kv_blocks,
                    prefill_batch_size=rank.prefill_batch_size,
                    decode_batch_size=rank.decode_batch_size,
                )
                for rank in (load.ranks if per_rank else ())
            ],
            attributes=_attributes(load) if per_rank else None,
        )

    # ---- health ----

    async def Health(
        self, request: lifecycle_pb2.HealthRequest, context: Any
    ) -> lifecycle_pb2.HealthResponse:
        async with answering(context):
            self._check_probe(request)
            await self._state.refresh()
            checks = [
                lifecycle_pb2.HealthCheck(name="grpc", state=_H.HEALTH_STATE_READY),
                self._admission_check(),
                self._model_check(),
            ]
            if request.include_inference_probe:
                checks.append(await self._probe())
            return lifecycle_pb2.HealthResponse(state=_worst(checks), checks=checks)

    def _check_probe(self, request: lifecycle_pb2.HealthRequest) -> None:
        if request.model:
            self._check_model(request.model, self._runtime.describe())
        if request.role:
            role = ENGINE_ROLE.read(request.role, "/role")
            if role is not self._state.observation.role:
                raise RoleMismatch("this engine has another role")

    def _admission_check(self) -> lifecycle_pb2.HealthCheck:
        states = {
            Admission.OPEN: _H.HEALTH_STATE_READY,
            Admission.DRAINING: _H.HEALTH_STATE_DRAINING,
        }
        admission = self._gate.admission
        return lifecycle_pb2.HealthCheck(
            name="admission",
            state=states.get(admission, _H.HEALTH_STATE_NOT_READY),
            message=admission.value,
        )

    def _model_check(self) -> lifecycle_pb2.HealthCheck:
        facts = self._state.facts()
        state, told = _H.HEALTH_STATE_READY, []
        # Each rank with its reason: in a group that stops as a whole that tells whose fault it is.
        for report in self._state.ranks[:_RANKS_TOLD]:
            state = _H.HEALTH_STATE_DEGRADED
            told.append(f"rank {report.rank}: {report.message or report.state.value}")
        if facts.released:
            state = _H.HEALTH_STATE_NOT_READY
            told.insert(0, "resources are released")
        if facts.weights.state is not WeightsState.VALID:
            state = _H.HEALTH_STATE_NOT_READY
            told.insert(0, f"weights {facts.weights.state.value}")
        return lifecycle_pb2.HealthCheck(name="model", state=state, message="; ".join(told))

    async def _probe(self) -> lifecycle_pb2.HealthCheck:
        """Goes past the gate, hence only where the gate is open anyway."""
        state, message = _H.HEALTH_STATE_READY, ""
        if self._gate.admission is not Admission.OPEN or self._gate.unfit is not None:
            state, message = _H.HEALTH_STATE_NOT_READY, "not run: the engine serves no requests"
        else:
            try:
                await self._ask(self._runtime.probe(), self._probe_timeout_s)
            except RuntimeFault as fault:
                state, message = _H.HEALTH_STATE_NOT_READY, fault.message
            except EngineNotAnswering as silent:
                state, message = _H.HEALTH_STATE_NOT_READY, silent.message
        return lifecycle_pb2.HealthCheck(name="inference_probe", state=state, message=message)

    # ---- ending requests ----

    async def Abort(
        self, request: lifecycle_pb2.AbortRequest, context: Any
    ) -> lifecycle_pb2.AbortResponse:
        async with answering(context):
            match request.WhichOneof("target"):
                case "request_id" if request.request_id:
                    return await self._abort_one(request.request_id)
                case "all_requests":
                    self._only_admin("aborting all requests")
                    return await self._abort_all()
                case "kv_session":
                    return await self._abort_session(request.kv_session)
                case _:
                    detail = "name a request, or say all_requests"
                    raise InvalidArgument(detail, faults=(FieldFault("/request_id", detail),))

    async def _abort_one(self, request_id: str) -> lifecycle_pb2.AbortResponse:
        if not self._admin:
            self._check_own(request_id)
        message = _ABORTED_BY_ADMIN if self._admin else _ABORTED_BY_CALLER
        if self._gate.end_held((request_id,), message):
            return _aborted(lifecycle_pb2.AbortStatus.ABORT_STATUS_ABORTED)
        tally = await self._ask(self._runtime.abort((request_id,), message), self._timeout_s)
        outcome = tally.outcomes.get(request_id, AbortOutcome.NOT_FOUND)
        if outcome is AbortOutcome.ABORTED:
            return _aborted(lifecycle_pb2.AbortStatus.ABORT_STATUS_ABORTED)
        if outcome is AbortOutcome.ALREADY_FINISHED or self._gate.ended_lately(request_id):
            return _aborted(lifecycle_pb2.AbortStatus.ABORT_STATUS_ALREADY_FINISHED)
        if outcome is AbortOutcome.NOT_FOUND:
            raise UnknownRequest("there is no request of that id")
        if outcome is AbortOutcome.UNVERIFIED:
            return lifecycle_pb2.AbortResponse(message="told to end, and not seen to have ended")
        raise Internal

    async def _abort_session(self, session: kv_pb2.KvSessionRef) -> lifecycle_pb2.AbortResponse:
        if not isinstance(self._runtime, KvSessionRuntime):
            raise UnsupportedFeature("this engine has no KV sessions")
        if not session.session_id:
            detail = "name a session"
            fault = FieldFault("/kv_session/session_id", detail)
            raise InvalidArgument(detail, faults=(fault,))
        message = _ABORTED_BY_ADMIN if self._admin else _ABORTED_BY_CALLER
        ending = self._runtime.abort_kv_session(session, message, by_admin=self._admin)
        outcome = await self._ask(ending, self._timeout_s)
        if outcome is AbortOutcome.NOT_FOUND:
            raise UnknownKvSession("there is no KV session of that id")
        if outcome is AbortOutcome.FAILED:
            raise Internal
        return _aborted(_ABORT_STATUS[outcome])

    async def _abort_all(self) -> lifecycle_pb2.AbortResponse:
        held = len(self._gate.end_held(None, _ABORTED_BY_ADMIN))
        tally = await self._ask(self._runtime.abort(None, _ABORTED_BY_ADMIN), self._timeout_s)
        outcomes = list(tally.outcomes.values())
        ended = held + outcomes.count(AbortOutcome.ABORTED)
        failed = outcomes.count(AbortOutcome.FAILED)
        if failed:
            raise Internal
        unsure = outcomes.count(AbortOutcome.UNVERIFIED)
        if unsure:
            message = f"{ended} requests aborted, {unsure} told to end and not seen to have ended"
            return lifecycle_pb2.AbortResponse(message=message)
        statuses = lifecycle_pb2.AbortStatus
        return lifecycle_pb2.AbortResponse(
            # With nothing in flight nothing has been changed, and an observer is told so.
            status=(
                statuses.ABORT_STATUS_ABORTED if ended else statuses.ABORT_STATUS_ALREADY_FINISHED
            ),
            message=f"{ended} requests aborted",
        )

    def _check_own(self, request_id: str) -> None:
        """Somebody else's request looks like none at all: ids of others are nobody's business."""
        try:
            owner = self._gate.owner_of(request_id)
        except KeyError:
            owner, known = None, False
        else:
            known = True
        if not known or owner != self._callers.owner():
            raise UnknownRequest("you have no request of that id")

    # ---- adapters ----

    async def LoadLora(
        self, request: lora_pb2.LoadLoraRequest, context: Any
    ) -> lora_pb2.LoadLoraResponse:
        async with answering(context):
            self._only_admin("adapters")
            return await self._adapters.load(request, self._callers.actor())

    async def UnloadLora(
        self, request: lora_pb2.UnloadLoraRequest, context: Any
    ) -> lora_pb2.UnloadLoraResponse:
        async with answering(context):
            self._only_admin("adapters")
            return await self._adapters.unload(request, self._callers.actor())

    async def ListLoras(
        self, request: lora_pb2.ListLorasRequest, context: Any
    ) -> lora_pb2.ListLorasResponse:
        async with answering(context):
            return await self._adapters.list()

    # ---- cache events ----

    async def GetKvEventSources(
        self, request: kv_pb2.GetKvEventSourcesRequest, context: Any
    ) -> kv_pb2.GetKvEventSourcesResponse:
        async with answering(context):
            return await self._ask(self._kv_events().kv_event_sources(request), self._timeout_s)

    async def SubscribeKvEvents(  # type: ignore[override]
        self, request: kv_pb2.SubscribeKvEventsRequest, context: Any
    ) -> None:
        async with answering(context):
            runtime = self._kv_events()
            # The events carry the tokens of everybody's prompts.
            self._only_admin("subscribing to cache events")
            async with closing(runtime.kv_events(request)) as told:
                async for event in until(self._ending, told):
                    await context.write(event)
            if self._ending.is_set():
                await context.write(_stopping())

    def _kv_events(self) -> KvEventRuntime:
        if not isinstance(self._runtime, KvEventRuntime):
            raise UnsupportedOperation("this engine does not offer cache events")
        return self._runtime

    # ---- shared ----

    def _only_admin(self, what: str) -> None:
        if not self._admin:
            raise AdminListenerOnly(f"{what} belongs to the admin listener")

    @staticmethod
    def _check_model(model: str, engine: EngineDescription) -> None:
        if model not in engine.models:
            raise UnknownModel("this engine does not serve that model")

    @staticmethod
    async def _ask(question: Awaitable[T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await question
        except TimeoutError:
            raise EngineNotAnswering("the engine did not answer in time") from None


def _stopping() -> kv_pb2.SubscribeKvEventsResponse:
    code = error_pb2.ErrorCode.ERROR_CODE_DRAINING
    error = error_pb2.EngineError(code=code, message="the engine is stopping", retryable=True)
    return kv_pb2.SubscribeKvEventsResponse(error=error)


def _aborted(status: lifecycle_pb2.AbortStatus.ValueType) -> lifecycle_pb2.AbortResponse:
    return lifecycle_pb2.AbortResponse(status=status)


def _worst(checks: list[lifecycle_pb2.HealthCheck]) -> lifecycle_pb2.HealthState.ValueType:
    seen = {check.state for check in checks}
    for state in (
        _H.HEALTH_STATE_NOT_READY,
        _H.HEALTH_STATE_DRAINING,
        _H.HEALTH_STATE_DEGRADED,
    ):
        if state in seen:
            return state
    return _H.HEALTH_STATE_READY


def _generation(engine: EngineDescription) -> model_pb2.GenerationCapabilities:
    can = engine.features

    def logprobs(feature: Feature) -> model_pb2.LogprobCapabilities:
        if feature not in can:
            return model_pb2.LogprobCapabilities(supported=False)
        top_n = model_pb2.CandidateTokenSelectionMode.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N
        return model_pb2.LogprobCapabilities(
            supported=True, candidate_selection_modes=[top_n], max_top_n=engine.max_top_logprobs
        )

    return model_pb2.GenerationCapabilities(
        prompt_logprobs=logprobs(Feature.PROMPT_LOGPROBS),
        output_logprobs=logprobs(Feature.OUTPUT_LOGPROBS),
        guided_decoding=model_pb2.GuidedDecodingCapabilities(
            supported=Feature.GUIDED_DECODING in can
        ),
        max_num_sequences=engine.max_sequences,
        supports_priority=False,
        supports_stop_in_output=True,
        supports_cache_salt=Feature.CACHE_SALT in can,
        supports_prefix_cache_bypass=Feature.PREFIX_CACHE_BYPASS in can,
    )
