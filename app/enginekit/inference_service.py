"""`Inference`: each request through the gate, then to the runtime."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from app.enginekit.admission import AdmissionGate, HeldRequestEnded, Ticket
from app.enginekit.auth import Callers
from app.enginekit.generation import ready_request
from app.enginekit.refusals import answering
from app.enginekit.relaying import closing
from app.enginekit.runtime import RequestRefused, Runtime
from app.rpc.openengine.v1 import error_pb2, generation_pb2, openengine_pb2_grpc

log = logging.getLogger(__name__)

_OWN_END = frozenset(
    {
        generation_pb2.FinishReason.FINISH_REASON_STOP,
        generation_pb2.FinishReason.FINISH_REASON_LENGTH,
    }
)


class InferenceService(openengine_pb2_grpc.InferenceServicer):
    """A request that cannot be taken on gets a gRPC status whose ErrorInfo reason is the name of
    an ErrorCode; one that was taken on ends with an event, and the RPC with OK."""

    def __init__(
        self,
        runtime: Runtime,
        gate: AdmissionGate,
        callers: Callers,
        new_id: Callable[[], str],
    ) -> None:
        self._runtime = runtime
        self._gate = gate
        self._callers = callers
        self._new_id = new_id

    # A coroutine that writes, not a generator: a generator that grpc drops in the middle of a
    # write would release its place in the gate only when it is collected.
    async def Generate(  # type: ignore[override]
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> None:
        async with answering(context):
            ready = ready_request(request, self._runtime.describe(), self._new_id)
            try:
                async with self._gate.passage(ready.request_id, self._callers.owner()) as ticket:
                    await self._relay(ready, ticket, context)
            except HeldRequestEnded as ended:
                await context.write(_ended(ready.request_id, ended))

    async def _relay(
        self, request: generation_pb2.GenerateRequest, ticket: Ticket, context: Any
    ) -> None:
        outputs = max(1, request.sampling.num_sequences)
        told = False
        try:
            async with closing(self._runtime.generate(request)) as responses:
                async for response in responses:
                    told = True
                    if response.WhichOneof("event") == "finished":
                        outputs -= response.finished.reason in _OWN_END
                        ticket.finished = outputs == 0
                    elif response.WhichOneof("event") == "prefill_ready":
                        ticket.finished = True
                    await context.write(response)
        except RequestRefused as refused:
            if not told:
                raise
            await context.write(_error(request.request_id, refused.code, refused.message, refused))
        except Exception:
            if not told:
                raise
            log.exception("a generation failed")
            internal = error_pb2.ErrorCode.ERROR_CODE_INTERNAL
            await context.write(_error(request.request_id, internal, "the engine failed", None))


def _error(
    request_id: str, code: int, message: str, refused: RequestRefused | None
) -> generation_pb2.GenerateResponse:
    known: Any = code
    return generation_pb2.GenerateResponse(
        request_id=request_id,
        error=error_pb2.EngineError(
            code=known, message=message, retryable=refused is not None and refused.retryable
        ),
    )


def _ended(request_id: str, ended: HeldRequestEnded) -> generation_pb2.GenerateResponse:
    """A request that nobody let in: aborted like any other, or worth trying again later."""
    if ended.aborted:
        finished = generation_pb2.GenerationFinished(
            output_index=0,
            reason=generation_pb2.FinishReason.FINISH_REASON_CANCELLED,
            message=ended.message,
        )
        return generation_pb2.GenerateResponse(request_id=request_id, finished=finished)
    return generation_pb2.GenerateResponse(
        request_id=request_id,
        error=error_pb2.EngineError(
            code=error_pb2.ErrorCode.ERROR_CODE_DRAINING, message=ended.message, retryable=True
        ),
    )
