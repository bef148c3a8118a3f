"""An engine at the port, with weather: what each conversation with it does is drawn in advance.

It keeps the truth besides what it says: how often an order took effect, how it really ended, which
of its lives was asked what. When the weather is used up it is fine for ever, so that everything
that can be settled gets settled.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, cast

from app.backends.port import (
    Discovery,
    EngineRefused,
    EngineSilent,
    Found,
    Order,
    OutcomeLost,
    Silence,
)
from app.domain.capabilities import Capabilities
from app.domain.facts import EngineFacts, WeightsFact
from app.domain.kinds import (
    Admission,
    CacheKind,
    FailureEffect,
    NewRequests,
    OperationKind,
    PauseMode,
    WeightsState,
)
from app.domain.operation import JsonObject, OperationError, Progress
from app.domain.transitions import (
    Cancelled,
    Completed,
    EngineAccepted,
    Fact,
    Failed,
    Progressed,
)
from app.domain.weight_sessions import SessionStage

Send = Literal[
    "fine",
    "fails",
    "refuses",
    "drains",
    "lost on the way",
    "lost when taken on",
    "lost when half told",
    "restarts and remembers",
    "restarts and forgets",
    "breaks",
]
Ask = Literal["fine", "silent", "breaks"]
SENDS: tuple[Send, ...] = Send.__args__  # type: ignore[attr-defined]
ASKS: tuple[Ask, ...] = Ask.__args__  # type: ignore[attr-defined]

_REFUSAL = OperationError("ABORTED", "ENGINE_BUSY", "busy", effect=FailureEffect.NONE)
_RESTARTED = OperationError("UNKNOWN", "ENGINE_RESTARTED", "restarted")
_BROKEN = OperationError("INTERNAL", "BROKEN", "broken", effect=FailureEffect.ROLLED_BACK)


@dataclass
class Kept:
    """An order as the engine remembers it."""

    instance_id: str
    facts: list[Fact]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, fact: Fact) -> None:
        self.facts.append(replace(fact, engine_sequence=len(self.facts) + 1))

    @property
    def ended(self) -> bool:
        return isinstance(self.facts[-1], Completed | Failed | Cancelled)


class ScriptedBackend:
    """Implements `EngineBackend`. `trace`: what was asked of which life and what it answered."""

    def __init__(
        self,
        sends: list[Send] | None = None,
        finds: list[Ask] | None = None,
        reads: list[Ask] | None = None,
        *,
        records_ends: bool = False,
    ) -> None:
        self.sends, self.finds, self.reads = sends or [], finds or [], reads or []
        self.cancels: list[Exception] = []  # answers to the next requests to cancel
        self.drain_s = 0.02
        self.on_the_way: asyncio.Event | None = None  # orders wait for it before they arrive
        self.trace: list[tuple[str, str, str, bool]] = []  # what, order, life, known
        self.effects: Counter[str] = Counter()
        self.ends: dict[str, type[Fact]] = {}
        self.kept: dict[str, Kept] = {}
        self.records_ends = records_ends  # `find` tells how it ended, not only that it has
        self._life = 1
        self._numbers: dict[str, str] = {}

    @property
    def instance_id(self) -> str:
        return f"life-{self._life}"

    def restart(self, *, remembers: bool) -> None:
        self._life += 1
        if not remembers:
            self.kept.clear()
        for operation_id, known in self.kept.items():
            if not known.ended:
                self._end(operation_id, Failed(error=_RESTARTED))

    # ---- reading ----

    async def discover(self, timeout_s: float) -> Discovery:
        await self._ask(self.reads)
        self.trace.append(("read", "", self.instance_id, True))
        return Discovery({}, (), CAPABILITIES, self._facts())

    async def load(self, timeout_s: float) -> JsonObject:
        return {"running_requests": 0}

    async def find(self, operation_id: str, timeout_s: float) -> Found | None:
        await self._ask(self.finds)
        known = self.kept.get(operation_id)
        self.trace.append(("find", operation_id, self.instance_id, known is not None))
        if known is None:
            return None
        last = known.facts[-1]
        told = self.records_ends and isinstance(last, Completed | Failed | Cancelled)
        end = cast("Completed", replace(last, engine_sequence=None)) if told else None
        return Found(self._number(operation_id), known.instance_id, known.ended, end)

    async def _ask(self, weather: list[Ask]) -> None:
        await asyncio.sleep(0)
        how = weather.pop(0) if weather else "fine"
        if how == "silent":
            raise EngineSilent(Silence.UNREACHABLE)
        if how == "breaks":
            raise ZeroDivisionError("a fault of the backend's own")

    def _facts(self) -> EngineFacts:
        return EngineFacts(
            instance_id=self.instance_id,
            revision=1,
            admission=Admission.OPEN,
            weights=WeightsFact("v1", WeightsState.VALID),
            observed_at=datetime.now(UTC),
        )

    # ---- orders ----

    async def carry_out(self, order: Order) -> AsyncGenerator[Fact, None]:
        await asyncio.sleep(0)
        if self.on_the_way is not None:
            await self.on_the_way.wait()
        operation_id = order.operation_id
        how: Send = self.sends.pop(0) if self.sends else "fine"
        if how == "lost on the way":
            self.trace.append(("send", operation_id, self.instance_id, operation_id in self.kept))
            raise OutcomeLost("lost on the way")
        if how == "breaks":
            self.trace.append(("send", operation_id, self.instance_id, operation_id in self.kept))
            raise ZeroDivisionError("a fault of the backend's own")
        known = self.kept.get(operation_id)
        self.trace.append(("send", operation_id, self.instance_id, known is not None))
        if known is None:
            if how == "refuses":
                raise EngineRefused(_REFUSAL)
            known = self._take_on(operation_id, order, how)
        if how == "lost when taken on":
            raise OutcomeLost("lost when taken on")
        heard = 0
        while heard < len(known.facts):
            if how == "lost when half told" and heard == 1:
                raise OutcomeLost("lost when half told")
            yield known.facts[heard]
            heard += 1
            if how == "restarts and remembers" and heard == 1:
                self.restart(remembers=True)
                raise OutcomeLost("restarted")
            if how == "restarts and forgets" and heard == 1:
                # Here and not when it was taken on: whoever stops listening before this and
                # attaches again sees the same order end, which then has its effect only once.
                if not known.ended:
                    self.effects[operation_id] += 1
                self.restart(remembers=False)
                raise OutcomeLost("restarted")
            if heard == len(known.facts) and not known.ended:
                await self._drain(operation_id, known)

    def _take_on(self, operation_id: str, order: Order, how: Send) -> Kept:
        known = Kept(self.instance_id, [])
        self.kept[operation_id] = known
        known.tell(
            EngineAccepted(
                engine_operation_id=self._number(operation_id), instance_id=self.instance_id
            )
        )
        known.tell(Progressed(progress=Progress("working", 1, 2, "requests")))
        if how == "fails":
            self._end(operation_id, Failed(error=_BROKEN))
        elif how not in ("drains", "restarts and remembers", "restarts and forgets"):
            self._carry(operation_id)
        return known

    async def _drain(self, operation_id: str, known: Kept) -> None:
        try:
            async with asyncio.timeout(self.drain_s):
                await known.cancelled.wait()
        except TimeoutError:
            if not known.ended:
                self._carry(operation_id)
        else:
            if not known.ended:
                self._end(operation_id, Cancelled(message="as asked"))

    def finish_drain(self) -> None:
        """What still drains has nothing left to wait for."""
        for operation_id, known in self.kept.items():
            if not known.ended:
                self._carry(operation_id)
            known.cancelled.set()

    def _carry(self, operation_id: str) -> None:
        self.effects[operation_id] += 1
        self._end(operation_id, Completed(result={"changed": True}))

    def _end(self, operation_id: str, fact: Fact) -> None:
        self.kept[operation_id].tell(fact)
        self.ends[operation_id] = type(fact)

    def _number(self, operation_id: str) -> str:
        return self._numbers.setdefault(operation_id, f"e-{len(self._numbers) + 1}")

    async def kv_event_sources(self, timeout_s: float) -> tuple[JsonObject, ...] | None:
        return None

    async def read_back(
        self, order: Order, sent_to: str | None, timeout_s: float
    ) -> Completed | None:
        return None

    async def go_on(
        self, stage: SessionStage, key: str, expected_revision: int | None, timeout_s: float
    ) -> None:
        raise AssertionError("no order here comes in several calls")

    def end_without_record(self, order: Order) -> Fact | None:
        return None

    async def cancel(self, engine_operation_id: str, timeout_s: float) -> None:
        await asyncio.sleep(0)
        if self.cancels:
            raise self.cancels.pop(0)
        for operation_id, number in self._numbers.items():
            if number == engine_operation_id and operation_id in self.kept:
                self.kept[operation_id].cancelled.set()

    async def stop_profile(self, engine_operation_id: str, key: str, timeout_s: float) -> None:
        """Nothing is recorded."""

    async def close(self) -> None:
        """Nothing is held."""


CAPABILITIES = Capabilities(
    operations=frozenset(OperationKind),
    cancellable=frozenset({OperationKind.PAUSE}),
    cache_kinds=frozenset(CacheKind),
    pause_modes=frozenset(PauseMode),
    new_requests=frozenset(NewRequests),
    models=("tiny",),
)


class ScriptedBackends:
    """In the place of the registry: the same backend whatever is registered."""

    def __init__(self, engines: dict[str, ScriptedBackend]) -> None:
        self._engines = engines

    def check(self, *_registration: Any) -> None:
        """Everything may be registered."""

    def of(self, registration: Any) -> ScriptedBackend:
        return self._engines[registration.id]

    def forget(self, engine_id: str) -> None:
        """Nothing is held."""

    async def close(self) -> None:
        """Nothing is held."""
