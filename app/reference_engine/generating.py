"""A generation request from the kit to the ranks and back, as the engine's role wants it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from app.domain.kinds import EngineRole
from app.enginekit.runtime import RequestRefused, RuntimeFault
from app.reference_engine import messages as m
from app.reference_engine.engine import Engine
from app.reference_engine.errors import (
    DuplicateRequest,
    InvalidRequest,
    KvSessionGone,
    KvTransferFailed,
    Overloaded,
    RankLost,
    ReferenceEngineError,
    UnknownAdapter,
    UnsupportedRequest,
    WrongRole,
)
from app.reference_engine.handoff import Handoff
from app.reference_engine.intake import Intake
from app.reference_engine.kv_reference import claim_of
from app.reference_engine.responses import response_of
from app.rpc.openengine.v1 import error_pb2
from app.rpc.openengine.v1 import generation_pb2 as pb

Responses = AsyncGenerator[pb.GenerateResponse, None]
_E = error_pb2.ErrorCode


class Generating:
    """The role decides for requests that come from then on; it is changed while nothing runs."""

    def __init__(self, engine: Engine, intake: Intake, handoff: Handoff, role: EngineRole) -> None:
        self._engine = engine
        self._intake = intake
        self._handoff = handoff
        self._role = role

    @property
    def role(self) -> EngineRole:
        return self._role

    async def prepare(self, role: EngineRole | None) -> None:
        """What that role needs is there when this returns, and may be there without being used.
        Raises RuntimeFault."""
        if role is not EngineRole.PREFILL:
            return
        try:
            await self._handoff.listen()
        except OSError as error:
            cause = f"the address for KV cannot be had: {error.strerror}"
            raise RuntimeFault("KV_ADDRESS_UNAVAILABLE", cause, retryable=True) from error

    def take_role(self, role: EngineRole | None) -> None:
        """None: as it is. Sessions of an earlier role are there to be fetched until they end."""
        self._role = role or self._role

    async def generate(self, request: pb.GenerateRequest) -> Responses:
        """See `Runtime.generate`."""
        try:
            async with contextlib.aclosing(self._responses(request)) as responses:
                async for response in responses:
                    yield response
        except ReferenceEngineError as error:
            raise refusal_of(error) from error

    def _responses(self, request: pb.GenerateRequest) -> Responses:
        """Raises WrongRole, InvalidRequest or UnsupportedRequest."""
        if request.kv.HasField("session") is not (self._role is EngineRole.DECODE):
            raise WrongRole(_ADVICE[self._role])
        ready = self._intake.read(request)
        match self._role:
            case EngineRole.PREFILL:
                return self._handoff.prefill(ready)
            case EngineRole.DECODE:
                return self._handoff.decode(ready, claim_of(request.kv.session))
        return self._whole(ready)

    async def _whole(self, request: m.GenerationRequest) -> Responses:
        async with contextlib.aclosing(self._engine.generate(request)) as reports:
            async for report in reports:
                yield response_of(report)


_ADVICE = {
    EngineRole.AGGREGATED: "this engine does prefill and decode itself: send it without a session",
    EngineRole.PREFILL: "this engine does prefill alone: take the session to a decode engine",
    EngineRole.DECODE: "this engine goes on from a KV session alone: a prefill engine gives one",
}


def refusal_of(error: ReferenceEngineError) -> RequestRefused:
    """As the kit tells it."""
    match error:
        case UnsupportedRequest():
            code, again = _E.ERROR_CODE_UNSUPPORTED_FEATURE, False
        case InvalidRequest():
            code, again = _E.ERROR_CODE_INVALID_ARGUMENT, False
        case UnknownAdapter():
            # The core protocol has no code of its own for it; an adapter stands for a model.
            code, again = _E.ERROR_CODE_MODEL_NOT_FOUND, False
        case WrongRole():
            code, again = _E.ERROR_CODE_ROLE_MISMATCH, False
        case DuplicateRequest():
            code, again = _E.ERROR_CODE_DUPLICATE_REQUEST, False
        case Overloaded():
            code, again = _E.ERROR_CODE_OVERLOADED, True
        case KvSessionGone():
            code, again = _E.ERROR_CODE_KV_SESSION_NOT_FOUND, False
        case KvTransferFailed(again=again):
            code = _E.ERROR_CODE_KV_TRANSFER_FAILED
        case _:
            code, again = _E.ERROR_CODE_INTERNAL, isinstance(error, RankLost)
    return RequestRefused(code, str(error), retryable=again)
