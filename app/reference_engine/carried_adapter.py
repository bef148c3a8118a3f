"""Loading and unloading an adapter, as the kit orders them rank by rank."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import TypeVar

from app.domain.commands import Command, LoadLora, UnloadLora
from app.domain.facts import LoraFact
from app.enginekit.runtime import Conclusion, RuntimeFault
from app.reference_engine import adapter_orders as a
from app.reference_engine.adapter_sources import AdapterPolicy
from app.reference_engine.carried_change import fault_of
from app.reference_engine.change import Change
from app.reference_engine.engine import Engine
from app.reference_engine.errors import (
    AdapterRefused,
    OrderRejected,
    RankLost,
    SourceRefused,
)

T = TypeVar("T")


def fact_of(adapter: a.LoadedAdapter) -> LoraFact:
    return LoraFact(name=adapter.name, id=adapter.number, path=adapter.path)


class CarriedAdapter:
    """One order's way through the ranks. From its preparation until its end, the adapters that go
    with it take no new requests."""

    def __init__(
        self,
        operation_id: str,
        command: LoadLora | UnloadLora,
        engine: Engine,
        policy: AdapterPolicy,
    ) -> None:
        self.operation_id = operation_id
        self.group = engine.group  # the order ends with it
        self._command = command
        self._engine = engine
        self._policy = policy
        self._stop = threading.Event()
        self._finding: asyncio.Task[a.AdapterPreparation] | None = None
        self._order: a.AdapterPreparation | None = None
        self._change: Change | None = None
        self._going: tuple[a.LoadedAdapter, ...] = ()

    async def prepare(self, rank: int) -> None:
        """Raises RuntimeFault, with nothing changed."""
        if self._finding is None:
            self._finding = asyncio.create_task(self._preparation(), name="find adapter")
        # Shielded: one rank's step may be cancelled, and the others go on. `rollback` ends it.
        order = await asyncio.shield(self._finding)
        if self._change is None:
            self._order = order
            self._change = self.group.change(order)
        try:
            await self._change.prepare(rank)
        except OrderRejected as error:
            raise RuntimeFault("ADAPTER_REFUSED", error.cause, code="INVALID_ARGUMENT") from error
        except RankLost as error:
            raise fault_of(error) from error

    async def commit(self, rank: int) -> None:
        await _answer(self._prepared().commit(rank))

    async def rollback(self, rank: int) -> None:
        self._stop.set()
        if self._finding is not None:
            self._finding.cancel()
        try:
            if self._change is not None:
                await _answer(self._change.rollback(rank))
        finally:
            if rank == self._engine.ranks[0]:  # which takes requests on
                self._let_in()

    async def conclude(self) -> Conclusion:
        await _answer(self._prepared().conclude())
        self._let_in()
        gone = tuple(fact_of(one) for one in self._going)
        if isinstance(self._order, a.PrepareLoad):
            self._engine.adapters.used(self._order.adapter.name)
            return Conclusion(lora=fact_of(self._order.adapter), evicted=gone)
        return Conclusion(lora=gone[0])

    async def discard(self) -> None:
        """Nothing is left outside of the ranks."""

    def _let_in(self) -> None:
        self._engine.adapters.reopen(one.name for one in self._going)

    def _prepared(self) -> Change:
        if self._change is None:
            raise RuntimeFault("INTERNAL", "the order was not prepared")
        return self._change

    async def _preparation(self) -> a.AdapterPreparation:
        match self._command:
            case UnloadLora(name=name):
                self._close((name,))
                return a.PrepareUnload(change_id=self.operation_id, name=name)
            case LoadLora() as command:
                return await self._load(command)

    async def _load(self, command: LoadLora) -> a.PrepareLoad:
        try:
            source = await asyncio.to_thread(
                self._policy.find, command.path, self._engine.config, self._proceed
            )
        except (AdapterRefused, SourceRefused) as error:
            raise RuntimeFault("ADAPTER_REFUSED", str(error), code="INVALID_ARGUMENT") from error
        except OSError as error:
            cause = error.strerror or "not readable"
            raise RuntimeFault("ADAPTER_REFUSED", cause, code="INVALID_ARGUMENT") from error
        table = self._engine.adapters
        if any(one.number == command.id for one in table.loaded):
            text = "an adapter of that number is loaded"
            raise RuntimeFault("LORA_ID_TAKEN", text, code="ALREADY_EXISTS")
        evict = table.idle_longest(max(0, len(table.loaded) + 1 - self._policy.most))
        if evict is None:
            text = f"{len(table.loaded)} adapters are loaded, the most there may be, and in use"
            raise RuntimeFault("LORA_LIMIT", text, retryable=True, code="RESOURCE_EXHAUSTED")
        self._close(evict)
        adapter = a.LoadedAdapter(
            name=command.name,
            number=command.id or table.new_number(),
            path=command.path,
            source=source,
        )
        return a.PrepareLoad(change_id=self.operation_id, adapter=adapter, evict=evict)

    def _close(self, names: tuple[str, ...]) -> None:
        """At once and not in steps: nothing comes between looking and closing."""
        table = self._engine.adapters
        going = []
        for name in names:
            adapter = table.find(name)
            if adapter is None:
                text = "no adapter of that name is loaded"
                raise RuntimeFault("LORA_NOT_FOUND", text, code="NOT_FOUND")
            if users := table.users(name):
                text = f"{users} requests use the adapter"
                raise RuntimeFault("LORA_IN_USE", text, retryable=True, code="FAILED_PRECONDITION")
            going.append(adapter)
        self._going = tuple(going)
        table.close(names)

    def _proceed(self) -> None:
        if self._stop.is_set():
            raise AdapterRefused("the order was withdrawn")


def is_adapter_order(command: Command) -> bool:
    return isinstance(command, LoadLora | UnloadLora)


async def _answer(asked: Awaitable[T]) -> T:
    try:
        return await asked
    except (RankLost, OrderRejected) as error:
        raise fault_of(error) from error
