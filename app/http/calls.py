"""An order as it arrives: its headers read, its body turned into a command, and the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, cast

from fastapi import Depends, Header
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.auth.principal import Principal
from app.auth.requires import Gate, Need
from app.domain.commands import Command
from app.domain.idempotency import fingerprint
from app.domain.operation import Operation
from app.domain.scopes import Scope
from app.domain.weight_sessions import Chunk, SessionStage
from app.http.bodies import OrderBody
from app.http.negotiation import Preference, idempotency_key, preference_of
from app.http.payloads import brings_payload
from app.http.preconditions import expected_revision
from app.http.records import actor_of, caller_of
from app.http.refusals import ReasonMissing
from app.http.replies import operation_reply
from app.http.rooms import House, VisibleEngine, rooms_of
from app.http.route import one_header
from app.http.weight_bodies import UpdateWeightsBody
from app.operations.orders import OrderRequest
from app.operations.sessions import StageRequest, is_staged

KeyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="1 to 128 printable ASCII characters, quoted or bare; new for each order. "
        "Needed unless `dry_run`.",
    ),
]
IfMatchHeader = Annotated[
    str | None, Header(alias="If-Match", description='`"r7"`: refused with 412 at another revision')
]
PreferHeader = Annotated[
    str | None, Header(alias="Prefer", description="`wait=N`, N ≤ 25: answer when it has ended")
]


@dataclass(frozen=True, slots=True)
class OrderCall:
    """One call of a route that takes orders for an engine."""

    request: Request
    house: House
    engine: VisibleEngine
    if_match: str | None
    preference: Preference

    async def give(
        self, body: OrderBody, who: Principal, command: Command | None = None
    ) -> Response:
        """Judge it and take it on: 202, or 200 if it has ended within the time to wait; with
        `dry_run` the plan. `command`: the order, where the body alone does not say it."""
        given = command or body.command()
        if brings_payload(given):
            await self.house.payloads.admit(self.request, self.engine)
        self._require_reason(given, body)
        if body.override_freeze:
            await Need((given.kind.scope, Scope.ENGINES)).admit(self.request)
        order = self._order(body, who, given)
        if body.dry_run:
            return JSONResponse(dict(await self.house.orders.plan(order)))
        accepted = await self.house.orders.submit(order, self.engine)
        operation = await self._awaited(accepted.operation)
        replayed = {} if accepted.fresh else {"Idempotency-Replayed": "true"}
        return operation_reply(
            operation, accepted=True, headers={**self.preference.headers, **replayed}
        )

    async def update(self, body: UpdateWeightsBody, who: Principal) -> Response:
        """An update, or a call that goes on with one that comes in pieces: 200 where a chunk is
        staged on every rank, or the operation has ended, within the time to wait."""
        stage = body.stage()
        if stage is None:
            return await self.give(body, who)
        if brings_payload(stage):
            await self.house.payloads.admit(self.request, self.engine)
        request = self._stage(body, who, stage)
        if body.dry_run:
            return JSONResponse(dict(await self.house.sessions.plan(request)))
        accepted = await self.house.sessions.go_on(request)
        operation, there = await self._continued(accepted.operation, stage)
        replayed = {} if accepted.fresh else {"Idempotency-Replayed": "true"}
        return operation_reply(
            operation, accepted=not there, headers={**self.preference.headers, **replayed}
        )

    async def _continued(self, operation: Operation, stage: SessionStage) -> tuple[Operation, bool]:
        """And whether what the call is for has come about."""
        if not isinstance(stage.stage, Chunk):
            return await self._awaited(operation), False
        index = stage.stage.index
        if self.preference.wait_s and not operation.done:
            waiting = self.house.sessions.staged(operation.id, index, float(self.preference.wait_s))
            with self.house.waiting.one_more(self.request):
                operation = await self.house.closing.unless(waiting) or operation
        return operation, is_staged(operation, index)

    def _stage(self, body: UpdateWeightsBody, who: Principal, stage: SessionStage) -> StageRequest:
        expected = expected_revision(self.if_match, body.expected_revision)
        return StageRequest(
            engine_id=self.engine.id,
            command=stage,
            actor=actor_of(who),
            caller=caller_of(self.request, who, body.reason),
            model=body.model,
            key=self._key(body),
            fingerprint=self._fingerprint(body),
            expected_revision=expected.revision,
            revision_from_header=expected.from_header,
        )

    def _key(self, body: OrderBody) -> str | None:
        if body.dry_run:
            return None
        return idempotency_key(one_header(self.request, "idempotency-key"))

    def _require_reason(self, command: Command, body: OrderBody) -> None:
        """Raises ReasonMissing."""
        policy = cast("Gate", self.request.state.gate).policy.policy
        demanded = policy is not None and command.kind in policy.require_reason
        if demanded and not (body.reason or "").strip():
            raise ReasonMissing

    def _order(self, body: OrderBody, who: Principal, command: Command) -> OrderRequest:
        expected = expected_revision(self.if_match, body.expected_revision)
        key = self._key(body)
        caller = caller_of(self.request, who, body.reason)
        return OrderRequest(
            engine_id=self.engine.id,
            command=command,
            actor=actor_of(who),
            key=key,
            fingerprint=self._fingerprint(body),
            expected_revision=expected.revision,
            revision_from_header=expected.from_header,
            deadline_ms=body.deadline_ms,
            reason=body.reason,
            when_busy=body.when_busy,
            override_freeze=body.override_freeze,
            request_id=caller.request_id,
            trace_id=caller.trace_id,
            source=caller.source,
            scopes=caller.scopes,
        )

    def _fingerprint(self, body: OrderBody) -> str:
        path = self.request.scope["route"].path_format
        for name, value in self.request.path_params.items():
            path = path.replace(f"{{{name}}}", value)
        sent: dict[str, Any] = body.model_dump(mode="json", exclude_unset=True)
        return fingerprint(self.request.method, path, sent, self.if_match)

    async def _awaited(self, operation: Operation) -> Operation:
        if operation.done or not self.preference.wait_s:
            return operation
        return await awaited(self.request, operation, self.preference.wait_s)


async def awaited(request: Request, operation: Operation, wait_s: int) -> Operation:
    """The operation once it has ended, or as it stands when the time is up or the process is
    about to end: a caller who waits is answered, not cut off."""
    house = rooms_of(request)
    with house.waiting.one_more(request):
        waited = await house.closing.unless(house.orders.wait(operation.id, float(wait_s)))
    return waited or await house.ledger.operations.get(operation.id) or operation


async def _order_call(
    request: Request,
    house: House,
    engine: VisibleEngine,
    key: KeyHeader = None,
    if_match: IfMatchHeader = None,
    prefer: PreferHeader = None,
) -> OrderCall:
    # Declared for the OpenAPI document; read from the request, where a second one is seen.
    del key, if_match, prefer
    return OrderCall(
        request,
        house,
        engine,
        one_header(request, "if-match"),
        house.waiting.honoured(preference_of(request.headers.getlist("prefer"))),
    )


Call = Annotated[OrderCall, Depends(_order_call)]
