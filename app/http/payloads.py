"""Who may send an engine what it alone can read, and which engines are sent it at all.

Such a payload can't be looked at here, and an engine that reads it may run what its writer has put
there. So it takes a scope of its own, and the engine has to be named in the settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from app.auth.requires import Need
from app.auth.tokens.errors import PermissionDenied
from app.domain.commands import Command, UpdateWeights
from app.domain.engine import Engine
from app.domain.kinds import WeightTransferBackend
from app.domain.scopes import Scope
from app.domain.selectors import Selector
from app.domain.weight_sessions import Chunk, SessionStage, SessionWeights

_NEED = Need((Scope.WEIGHTS, Scope.WEIGHTS_UNSAFE))


class EnginePayloadsOff(PermissionDenied):
    """No setting of this gateway names the engine for payloads of its own."""

    reason = "ENGINE_PAYLOADS_OFF"

    def __init__(self) -> None:
        super().__init__(
            "This gateway passes no pickled payload on to this engine: it is not named in "
            "engine_payloads of its settings."
        )


@dataclass(frozen=True, slots=True)
class PayloadRule:
    """`selectors`: which engines are passed payloads of their own; none: no engine is."""

    selectors: tuple[Selector, ...] = ()

    def takes(self, engine: Engine) -> bool:
        labels = engine.registration.labels
        return any(one.takes(engine.id, labels) for one in self.selectors)

    async def admit(self, request: Request, engine: Engine) -> None:
        """Raises InsufficientScope, RefusedByPolicy, EnginePayloadsOff."""
        await _NEED.admit(request)
        if not self.takes(engine):
            raise EnginePayloadsOff


def brings_payload(order: Command | SessionStage) -> bool:
    """Whether it is an order to pass one on: the first call of a session, or a piece of it."""
    match order:
        case UpdateWeights(source=SessionWeights(transfer=way)):
            return way.kind is WeightTransferBackend.ENGINE_PAYLOAD
        case SessionStage(stage=Chunk(payload=payload)):
            return payload.kind is WeightTransferBackend.ENGINE_PAYLOAD
        case _:
            return False
