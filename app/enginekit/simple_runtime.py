"""The runtime port for an engine of one process: pauses and requests are dealt with already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass

from app.domain.capabilities import Capabilities
from app.domain.commands import Command, FlushCaches, Pause, Resume
from app.domain.facts import WeightsFact
from app.domain.kinds import AbortOutcome, OperationKind, PauseMode, WeightsState
from app.enginekit.in_flight import InFlight
from app.enginekit.runtime import (
    AbortTally,
    Conclusion,
    EngineDescription,
    Load,
    Observation,
    Order,
    RuntimeFault,
)
from app.rpc.openengine.v1 import generation_pb2

_PAUSED = "the engine was paused, which ended all requests in flight"


@dataclass(slots=True)
class _Begun:
    frozen_before: bool
    concluded: Conclusion | None = None


class SimpleRuntime(ABC):
    """Derive from it, say what the engine is, and generate. Pauses in all modes, resume and abort
    are offered as long as `generate` asks `self.requests` for its turns; everything else is a
    further operation in `capabilities` and a case in `carry_out`.

    `weight_version` is what `observe` tells.
    """

    ranks: tuple[int, ...] = (0,)
    weight_version: str | None = None

    def __init__(self) -> None:
        self.requests = InFlight()
        self._begun: dict[str, _Begun] = {}

    # ---- what an engine says and does ----

    @abstractmethod
    def describe(self) -> EngineDescription: ...

    @abstractmethod
    def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]: ...

    def capabilities(self) -> Capabilities:
        kinds = {OperationKind.PAUSE, OperationKind.RESUME, OperationKind.ABORT_REQUESTS}
        return Capabilities(operations=frozenset(kinds), pause_modes=frozenset(PauseMode))

    async def check(self, command: Command) -> None:
        """What can be found out before anything is changed. Raises RuntimeFault."""

    async def carry_out(self, command: Command) -> Conclusion:
        """An order that is neither a pause nor a resume. Raises RuntimeFault."""
        raise RuntimeFault("UNSUPPORTED_OPERATION", f"{command.kind.value} is not carried out here")

    async def undo(self, command: Command) -> None:
        """After a `carry_out` that raised, or that the deadline has cancelled. An engine that
        cannot be sure to be as before says so, and is then out of service."""
        if not isinstance(command, FlushCaches):  # an emptied cache costs time and nothing else
            raise RuntimeFault("NOT_UNDONE", f"{command.kind.value} cannot be taken back")

    # ---- the port ----

    async def observe(self) -> Observation:
        return Observation(weights=WeightsFact(self.weight_version, WeightsState.VALID))

    async def load(self) -> Load:
        return Load(
            running_requests=len(self.requests),
            queued_requests=0,
            used_kv_blocks=0,
            total_kv_blocks=self.describe().total_kv_blocks or 0,
        )

    async def prepare(self, order: Order, rank: int) -> None:
        await self.check(order.command)

    async def commit(self, order: Order, rank: int) -> None:
        begun = self._begun[order.operation_id] = _Begun(self.requests.frozen)
        match order.command:
            case Pause(mode=mode):
                begun.concluded = await self._pause(mode)
            case Resume():
                self.requests.freeze(False)
                begun.concluded = Conclusion(requests_continued=len(self.requests))
            case command:
                begun.concluded = await self.carry_out(command)

    async def _pause(self, mode: PauseMode) -> Conclusion:
        if mode is PauseMode.ABORT:
            outcomes = (await self.requests.end(None, _PAUSED)).outcomes.values()
            self.requests.freeze(False)
            return Conclusion(requests_aborted=list(outcomes).count(AbortOutcome.ABORTED))
        self.requests.freeze(mode is PauseMode.KEEP)
        return Conclusion(requests_kept=len(self.requests))

    async def rollback(self, order: Order, rank: int) -> None:
        begun = self._begun.pop(order.operation_id, None)
        if begun is None:
            return
        if isinstance(order.command, Pause | Resume):
            self.requests.freeze(begun.frozen_before)
        else:
            await self.undo(order.command)

    async def conclude(self, order: Order) -> Conclusion:
        concluded = self._begun.pop(order.operation_id).concluded
        assert concluded is not None
        return concluded

    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> AbortTally:
        return await self.requests.end(request_ids, message)

    async def probe(self) -> None:
        """One token, through `generate`."""
        request = generation_pb2.GenerateRequest(
            request_id="probe", model=self.describe().models[0], prompt="probe"
        )
        request.stopping.max_tokens = 1
        async for response in self.generate(request):
            if response.WhichOneof("event") == "token":
                return
        raise RuntimeFault("NO_TOKEN", "a generation came to no token")

    async def close(self) -> None:
        """Nothing to close."""
