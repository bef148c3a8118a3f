"""A small scripted engine behind the kit: it echoes prompts, and does to orders what it is told.

`MinimalEngine` implements the whole Runtime port without a model: a request answers with the words
of its prompt, one by one. Requests can be stalled, and each phase of each rank can be scripted to
be slow, to fail, to hang, or to raise something nobody expects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

from app.domain.capabilities import Capabilities
from app.domain.commands import FlushCaches, Pause, Resume
from app.domain.facts import WeightsFact
from app.domain.kinds import (
    AbortOutcome,
    CacheKind,
    EngineRole,
    OperationKind,
    PauseMode,
    WeightsState,
)
from app.domain.operation import Progress
from app.enginekit.runtime import (
    AbortTally,
    Conclusion,
    EngineDescription,
    Feature,
    Flushed,
    Load,
    Observation,
    Order,
    RankLoad,
    RequestRefused,
    RuntimeFault,
)
from app.rpc.openengine.v1 import error_pb2, generation_pb2

MODEL = "echo"
Hook = Callable[[Order, int], Awaitable[None]]


async def hang(_order: Order, _rank: int) -> None:
    await asyncio.Event().wait()


async def hang_deaf(_order: Order, _rank: int) -> None:
    """Does not even let go when it is cancelled, for a second and a half."""
    for _ in range(30):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


async def explode(_order: Order, _rank: int) -> None:
    raise ZeroDivisionError("secret detail of the engine")


async def fault(_order: Order, rank: int) -> None:
    raise RuntimeFault("RANK_BROKEN", f"rank {rank} cannot")


def slow(seconds: float) -> Hook:
    async def wait(_order: Order, _rank: int) -> None:
        await asyncio.sleep(seconds)

    return wait


def until(event: asyncio.Event) -> Hook:
    async def wait(_order: Order, _rank: int) -> None:
        await event.wait()

    return wait


@dataclass(frozen=True, slots=True)
class Call:
    """One step that reached a rank. `rank` -1: a conclude."""

    phase: str
    operation_id: str
    kind: OperationKind
    rank: int


@dataclass(slots=True)
class _Request:
    words: list[str]
    aborted: str | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class MinimalEngine:
    """`calls` lists every step that reached a rank; `scripts[phase, rank]` says what it does."""

    def __init__(self, *, world_size: int = 1, models: tuple[str, ...] = (MODEL,)) -> None:
        self.ranks: tuple[int, ...] = tuple(range(world_size))
        self.models = models
        self.calls: list[Call] = []
        self.scripts: dict[tuple[str, int], Hook] = {}
        self.features: frozenset[Feature] = frozenset()
        self.offered = Capabilities(
            operations=frozenset(
                {
                    OperationKind.FLUSH_CACHES,
                    OperationKind.PAUSE,
                    OperationKind.RESUME,
                    OperationKind.ABORT_REQUESTS,
                }
            ),
            cache_kinds=frozenset({CacheKind.PREFIX}),
            pause_modes=frozenset(PauseMode),
        )
        self.observation = Observation(
            weights=WeightsFact("v1", WeightsState.VALID), role=EngineRole.AGGREGATED
        )
        self.observing: Callable[[], Awaitable[None]] | None = None
        self.progress: tuple[Progress, ...] = ()  # reported by rank 0 while it prepares
        self.cached_blocks = 0
        self.started: list[str] = []  # ids of requests, in the order in which they were let in
        self.lost: RuntimeFault | None = None  # what a read of the load says instead
        self.stuck = False  # requests cannot be aborted
        self.closed = False
        self._requests: dict[str, _Request] = {}
        self._gone: set[str] = set()
        self._paused: PauseMode | None = None
        self._stalled = False
        self._wake = asyncio.Event()
        self._conclusions: dict[str, Conclusion] = {}
        self._before: dict[str, PauseMode | None] = {}

    # ---- for tests ----

    def script(self, phase: str, hook: Hook, *ranks: int) -> None:
        """`phase`: prepare, commit, rollback, conclude. No ranks: all of them."""
        for rank in ranks or (*self.ranks, -1):
            self.scripts[phase, rank] = hook

    def stall(self) -> None:
        """Requests stop in the middle until `go`."""
        self._stalled = True

    def go(self) -> None:
        self._stalled = False
        self._wake_all()

    @property
    def running(self) -> int:
        return len(self._requests)

    @property
    def paused(self) -> PauseMode | None:
        return self._paused

    def orders(self, phase: str = "prepare") -> list[str]:
        """Operation ids that reached rank 0 with that phase, in order."""
        return [call.operation_id for call in self.calls if (call.phase, call.rank) == (phase, 0)]

    def _wake_all(self) -> None:
        wake, self._wake = self._wake, asyncio.Event()
        wake.set()

    # ---- the port ----

    def describe(self) -> EngineDescription:
        return EngineDescription(
            name="minimal",
            version="1",
            models=self.models,
            tensor_parallel_size=len(self.ranks),
            kv_block_size=16,
            total_kv_blocks=64,
            max_running_requests=32,
            max_context_length=4096,
            max_output_tokens=2048,
            max_top_logprobs=5,
            max_sequences=4,
            features=self.features,
        )

    def capabilities(self) -> Capabilities:
        return self.offered

    async def observe(self) -> Observation:
        if self.observing is not None:
            await self.observing()
        return self.observation

    async def load(self) -> Load:
        if self.lost is not None:
            raise self.lost
        return Load(
            running_requests=self.running,
            queued_requests=0,
            used_kv_blocks=self.running,
            total_kv_blocks=64,
            ranks=(
                RankLoad(
                    data_parallel_rank=0,
                    running_requests=self.running,
                    queued_requests=0,
                    used_kv_blocks=self.running,
                    total_kv_blocks=64,
                ),
            ),
        )

    async def prepare(self, order: Order, rank: int) -> None:
        if rank == 0:
            for progress in self.progress:
                order.report(progress)
                await asyncio.sleep(0)
        await self._step("prepare", order, rank)

    async def commit(self, order: Order, rank: int) -> None:
        await self._step("commit", order, rank)
        if rank != 0:
            return
        command = order.command
        if isinstance(command, Pause):
            self._before.setdefault(order.operation_id, self._paused)
            self._conclusions[order.operation_id] = self._pause(command.mode)
        elif isinstance(command, Resume):
            kept = self.running
            self._before.setdefault(order.operation_id, self._paused)
            self._paused = None
            self._conclusions[order.operation_id] = Conclusion(requests_continued=kept)
            self._wake_all()
        elif isinstance(command, FlushCaches):
            freed, self.cached_blocks = self.cached_blocks, 0
            flushed = tuple(Flushed(kind, freed, self.running) for kind in command.caches)
            self._conclusions[order.operation_id] = Conclusion(changed=freed > 0, flushed=flushed)

    def _pause(self, mode: PauseMode) -> Conclusion:
        self._paused = mode
        if mode is PauseMode.ABORT:
            ended = len(self._requests)
            for request in self._requests.values():
                request.aborted = "ended by a pause"
            self._wake_all()
            return Conclusion(requests_aborted=ended)
        return Conclusion(requests_kept=self.running if mode is PauseMode.KEEP else 0)

    async def rollback(self, order: Order, rank: int) -> None:
        await self._step("rollback", order, rank)
        if rank == 0 and order.operation_id in self._before:
            self._paused = self._before.pop(order.operation_id)
            self._wake_all()

    async def conclude(self, order: Order) -> Conclusion:
        await self._step("conclude", order, -1)
        self._before.pop(order.operation_id, None)
        return self._conclusions.pop(order.operation_id)

    async def _step(self, phase: str, order: Order, rank: int) -> None:
        self.calls.append(Call(phase, order.operation_id, order.command.kind, rank))
        hook = self.scripts.get((phase, rank))
        if hook is not None:
            await hook(order, rank)

    async def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        if request.prompt == "refuse":
            code = error_pb2.ErrorCode.ERROR_CODE_OVERLOADED
            raise RequestRefused(code, "no room", retryable=True)
        if request.prompt == "lost":
            code = error_pb2.ErrorCode.ERROR_CODE_INTERNAL
            raise RequestRefused(code, "rank 1 is lost", retryable=True)
        if request.prompt == "explode":
            raise ZeroDivisionError("secret detail of the engine")
        self.started.append(request.request_id)
        mine = _Request(words=request.prompt.split() or ["token"])
        self._requests[request.request_id] = mine
        try:
            for index, word in enumerate(mine.words):
                if index == 1 and word == "explode":
                    raise ZeroDivisionError("secret detail of the engine")
                if index == 1 and word == "refuse":
                    code = error_pb2.ErrorCode.ERROR_CODE_KV_TRANSFER_FAILED
                    raise RequestRefused(code, "too late", retryable=True)
                while (self._held_up() or (self._stalled and index)) and mine.aborted is None:
                    await self._wake.wait()
                if mine.aborted is not None:
                    break
                yield _token(request.request_id, word)
                await asyncio.sleep(0)
            if mine.aborted is None:
                self.cached_blocks += 1
            yield _finished(request.request_id, mine)
        finally:
            del self._requests[request.request_id]
            self._gone.add(request.request_id)
            mine.over.set()

    def _held_up(self) -> bool:
        return self._paused is PauseMode.KEEP

    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> AbortTally:
        wanted = tuple(self._requests) if request_ids is None else request_ids
        outcomes = {}
        for name in wanted:
            if name in self._requests and self.stuck:
                outcomes[name] = AbortOutcome.FAILED
            elif name in self._requests:
                self._requests[name].aborted = message
                outcomes[name] = AbortOutcome.ABORTED
            else:
                known = name in self._gone
                outcomes[name] = AbortOutcome.ALREADY_FINISHED if known else AbortOutcome.NOT_FOUND
        ended = [name for name, how in outcomes.items() if how is AbortOutcome.ABORTED]
        ending = [self._requests[name] for name in ended]
        self._wake_all()
        for request in ending:
            await request.over.wait()
        return AbortTally(outcomes)

    async def probe(self) -> None:
        hook = self.scripts.get(("probe", -1))
        if hook is not None:
            await hook(Order(operation_id="", command=_NOTHING, report=print), -1)

    async def close(self) -> None:
        self.closed = True

    # ---- changes without an order ----

    def weights_become(self, state: WeightsState) -> None:
        self.observation = replace(
            self.observation, weights=replace(self.observation.weights, state=state)
        )


_NOTHING = FlushCaches(caches=(CacheKind.PREFIX,))


def _token(request_id: str, word: str) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        request_id=request_id,
        token=generation_pb2.TokenOutput(
            output_index=0, tokens=[generation_pb2.TokenInfo(token_id=len(word))], text=f"{word} "
        ),
    )


def _finished(request_id: str, request: _Request) -> generation_pb2.GenerateResponse:
    reason = generation_pb2.FinishReason
    return generation_pb2.GenerateResponse(
        request_id=request_id,
        finished=generation_pb2.GenerationFinished(
            output_index=0,
            reason=reason.FINISH_REASON_CANCELLED
            if request.aborted is not None
            else reason.FINISH_REASON_LENGTH,
            message=request.aborted or "",
        ),
        usage=generation_pb2.Usage(
            prompt_tokens=len(request.words), completion_tokens=len(request.words)
        ),
    )
