"""Orders of the layer: written into the ledger like every other, and waited for to their end."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from app.auth.principal import Principal
from app.auth.requires import Gate, Need
from app.backends.port import Discovery
from app.domain.capabilities import Capabilities
from app.domain.commands import Command
from app.domain.engine import Engine
from app.domain.errors import EngineBusy, EngineUnreachable
from app.domain.facts import EngineFacts
from app.domain.idempotency import fingerprint
from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Actor, JsonObject, Operation
from app.domain.scopes import Scope
from app.http.compat.asked import Asked
from app.http.compat.exposures import Flavour, Layer
from app.http.compat.refusals import OrderFailed, OutcomeUnknown
from app.http.negotiation import idempotency_key
from app.http.records import actor_of, caller_of
from app.http.refusals import Closing, Overloaded, ReasonMissing
from app.http.rooms import Rooms, rooms_of
from app.http.route import one_header
from app.ledger.values import OperationFilter
from app.operations.orders import OrderRequest

_BEHIND_DEADLINE_S = 5.0
_NO_DEADLINE_S = 86_400.0
# What such an order has brought about is still there as long as the revision is the same. Caches
# fill and requests come without one.
_LASTING = frozenset(
    {
        OperationKind.PAUSE,
        OperationKind.RESUME,
        OperationKind.RELEASE_RESOURCES,
        OperationKind.RESTORE_RESOURCES,
        OperationKind.SET_WEIGHT_VERSION,
        OperationKind.RECONFIGURE_SERVING,
        OperationKind.LOAD_LORA,
        OperationKind.UNLOAD_LORA,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatCall:
    """One call of an endpoint, by somebody who may make it."""

    request: Request
    engine: Engine
    who: Principal
    layer: Layer
    flavour: Flavour
    asked: Asked

    @property
    def house(self) -> Rooms:
        return rooms_of(self.request)

    @property
    def can(self) -> Capabilities:
        can = self.engine.observed.capabilities
        assert can is not None  # or there would be no such endpoint
        return can

    @property
    def actor(self) -> Actor:
        return actor_of(self.who)

    @property
    def name(self) -> str:
        """Of the endpoint, for the ledger."""
        template = cast("str", self.request.scope["route"].path)
        return template.removeprefix(f"/compat/{self.layer}/{{engine}}")

    @property
    def note(self) -> str:
        """What the ledger and the audit say as the reason of its orders."""
        return f"{self.layer.product} endpoint {self.name}"

    async def facts(self) -> EngineFacts:
        """As `discovered`."""
        return (await self.discovered()).facts

    async def discovered(self) -> Discovery:
        """Read now. Raises EngineUnreachable, also where only what stands before the engine
        answers; EngineFault, TooManyEngineReads."""
        with self.house.round_trips.one_more(self.engine.id):
            found = await self.house.fleet.discover(self.engine.id)
        if found.failed:
            raise EngineUnreachable("the engine has ended or does not answer")
        return found

    async def need(self, scope: Scope) -> None:
        """For what only some calls of an endpoint do. Raises InsufficientScope."""
        await Need((scope,)).admit(self.request)

    async def give(
        self, command: Command, part: str = "", deadline_ms: int | None = None
    ) -> Operation:
        """Order it and wait for its end; or for that of the same order given earlier, where this
        call is its blind repetition. `part`: one of several orders that the call makes.

        Raises what `Orders.submit` raises, OrderFailed, OutcomeUnknown, Closing, Overloaded.
        """
        return await self.ended(await self.begin(command, part, deadline_ms))

    async def begin(
        self, command: Command, part: str = "", deadline_ms: int | None = None
    ) -> Operation:
        """As `give`, and does not wait."""
        self._require_room()
        self._require_reason(command.kind)
        earlier = await self.earlier(command)
        if earlier is not None:
            return earlier
        request = self._order(command, part, deadline_ms)
        try:
            return (await self.house.orders.submit(request)).operation
        except EngineBusy:
            # What it is busy with may be a twin of this call.
            twin = await self.earlier(command)
            if twin is None:
                raise
            return twin

    async def ended(self, operation: Operation) -> Operation:
        """Raises OrderFailed, OutcomeUnknown, Closing."""
        operation = await self.until(operation, lambda seen: seen.done)
        if operation.state is not OperationState.SUCCEEDED:
            raise OrderFailed(operation)
        return operation

    async def until(self, operation: Operation, reached: Callable[[Operation], bool]) -> Operation:
        """The operation once it is there or has ended. Raises OutcomeUnknown, Closing."""
        if operation.done or reached(operation):
            return operation
        with self.house.waiting.one_more(self.request):
            waited = await self.house.closing.unless(self._reached(operation, reached))
        if waited is None:
            raise Closing
        return waited

    def key(self, part: str) -> str:
        """The caller's, where it has one: of several orders each has its own."""
        sent = one_header(self.request, "idempotency-key")
        if sent is None:
            return f"{self.layer}-{self.house.new_id()}"
        given = idempotency_key(sent)
        if not part:
            return given
        return f"{self.layer}-{hashlib.sha256(f'{given} {part}'.encode()).hexdigest()}"

    def fingerprint(self, part: str) -> str:
        query = [list(pair) for pair in self.asked.query]
        body = hashlib.sha256(self.asked.body).hexdigest()
        said = cast("JsonObject", {"query": query, "body": body, "part": part})
        path = f"/compat/{self.layer}/{self.engine.id}{self.name}"
        return fingerprint(self.request.method, path, said, None)

    async def busy_with(self, kind: OperationKind) -> bool:
        """Whether an order of that kind, anybody's, has the engine now."""
        engine = await self.house.ledger.engines.get(self.engine.id)
        if engine is None or engine.running_operation is None:
            return False
        running = await self.house.ledger.operations.get(engine.running_operation)
        return running is not None and running.kind is kind

    async def latest(self, kind: OperationKind) -> Operation | None:
        """The caller's latest order of that kind to this engine."""
        wanted = OperationFilter(
            engine_id=self.engine.id, kinds=frozenset({kind}), subject=self.who.subject
        )
        page = await self.house.ledger.operations.page(wanted, size=20)
        return next((one for one in page.items if one.actor == self.actor), None)

    async def earlier(self, command: Command, *, lasting: bool = False) -> Operation | None:
        """The same order, by the same caller, that still runs, or that has ended and left the
        engine as it is now. `lasting`: what it has brought about is still there as long as the
        revision is, also where orders of its kind do not say so by themselves."""
        if one_header(self.request, "idempotency-key") is not None:
            return None  # the caller says what is a repetition
        latest = await self.latest(command.kind)
        if latest is None or _canonical(latest.request) != _canonical(command.document()):
            return None
        if not latest.done:
            return latest
        lasts = lasting or command.kind in _LASTING
        succeeded = latest.state is OperationState.SUCCEEDED
        if lasts and succeeded and (await self.facts()).revision == latest.revision:
            return latest
        return None

    def _order(self, command: Command, part: str, deadline_ms: int | None) -> OrderRequest:
        caller = caller_of(self.request, self.who, self.note)
        return OrderRequest(
            engine_id=self.engine.id,
            command=command,
            actor=self.actor,
            key=self.key(part),
            fingerprint=self.fingerprint(part),
            deadline_ms=deadline_ms,
            reason=self.note,
            request_id=caller.request_id,
            trace_id=caller.trace_id,
            source=caller.source,
            scopes=caller.scopes,
        )

    def _require_room(self) -> None:
        """An endpoint that can't wait can't answer: nothing is begun then."""
        waiting = self.house.waiting
        if waiting.count >= waiting.most:
            raise Overloaded("As many callers wait for ends of operations as may.")

    def _require_reason(self, kind: OperationKind) -> None:
        """These endpoints have no place for words of the caller's own. Raises ReasonMissing."""
        policy = cast("Gate", self.request.state.gate).policy.policy
        if policy is not None and kind in policy.require_reason:
            raise ReasonMissing

    async def _reached(
        self, operation: Operation, reached: Callable[[Operation], bool]
    ) -> Operation:
        ledger, loop = self.house.ledger, asyncio.get_running_loop()
        ends_at = loop.time() + self._patience_s(operation)
        with ledger.events.subscribe() as events:
            while True:
                seen = await ledger.operations.get(operation.id)
                assert seen is not None  # it was taken on
                if seen.done or reached(seen):
                    return seen
                left_s = ends_at - loop.time()
                if left_s <= 0:
                    raise OutcomeUnknown(seen)
                await events.changed(left_s)

    def _patience_s(self, operation: Operation) -> float:
        """A little beyond the deadline, behind which only a read-back can bring an end."""
        if operation.deadline_at is None:
            return _NO_DEADLINE_S
        left = operation.deadline_at - self.house.clock.now()
        return max(left.total_seconds(), 0.0) + _BEHIND_DEADLINE_S


Act = Callable[[CompatCall], Awaitable[object]]


def _canonical(document: JsonObject) -> str:
    return json.dumps(dict(document), sort_keys=True)
