"""Who calls: one interceptor per listener, each for the audience of its own."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from app.auth.principal import AudienceKind, Principal
from app.auth.tokens.bearer import bearer_token
from app.domain.errors import ChadburnError
from app.domain.operation import Actor
from app.enginekit.admission import Owner
from app.enginekit.refusals import Internal, WrongListener, answering
from app.enginekit.settings import Verifier

log = logging.getLogger(__name__)

_HEALTH = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})

ANYONE = Actor(issuer="", subject="loopback", client_id="")
"""Stands for the caller on a listener that asks for no token."""


class Callers:
    """Carries the principal from the interceptor to the handler, within the task of one RPC."""

    def __init__(self) -> None:
        self._principal: ContextVar[Principal | None] = ContextVar("principal", default=None)

    def set(self, principal: Principal) -> None:
        self._principal.set(principal)

    def actor(self) -> Actor:
        principal = self._principal.get()
        if principal is None:
            return ANYONE
        return Actor(principal.issuer, principal.subject, principal.client_id)

    def owner(self) -> Owner:
        actor = self.actor()
        return None if actor is ANYONE else (actor.issuer, actor.subject, actor.client_id)


class BearerInterceptor(grpc.aio.ServerInterceptor):
    """Lets health pass, and else only a valid token of the listener's audience.

    A token for the other listener is genuine and still refused: PERMISSION_DENIED, where none or
    an invalid one is UNAUTHENTICATED. It is judged before the method is looked up, so that
    strangers do not learn what is served.
    """

    def __init__(self, verifier: Verifier, audience: AudienceKind, callers: Callers) -> None:
        self._verifier = verifier
        self._audience = audience
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method in _HEALTH:
            return await continuation(handler_call_details)
        try:
            principal = await self._judge(handler_call_details)
        except ChadburnError as refused:
            return _refusing(refused)
        except Exception:
            log.exception("a token could not be judged")
            return _refusing(Internal())
        self._callers.set(principal)
        return await continuation(handler_call_details)

    async def _judge(self, details: grpc.HandlerCallDetails) -> Principal:
        sent = [
            str(value) for name, value in details.invocation_metadata if name == "authorization"
        ]
        principal = await self._verifier.verify(bearer_token(sent))
        if principal.audience is not self._audience:
            raise WrongListener("this token was not made for this listener")
        return principal


def _refusing(refused: ChadburnError) -> Any:
    """A handler that answers so to anything: a status comes alike for every kind of method."""

    async def refuse(_request: Any, context: Any) -> None:
        async with answering(context):
            raise refused

    return grpc.unary_unary_rpc_method_handler(refuse)
