"""The front end's view of the engine: requests as streams of reports, orders as coroutines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from app.reference_engine import change_orders as c
from app.reference_engine import messages as m
from app.reference_engine.adapter_orders import LoadedAdapter, PrepareLoad
from app.reference_engine.adapter_table import AdapterTable
from app.reference_engine.cache_changes import CacheChanged, CacheCleared
from app.reference_engine.change import Change, ChangeOutcome, Holdings
from app.reference_engine.channel import Issued
from app.reference_engine.config import ModelConfig, read_config
from app.reference_engine.errors import (
    DuplicateRequest,
    OrderRejected,
    Overloaded,
    RankLost,
    ReferenceEngineError,
    StartupFailed,
    UnknownAdapter,
)
from app.reference_engine.limits import CoreSettings
from app.reference_engine.processes import WORKER
from app.reference_engine.supervisor import Supervisor
from app.reference_engine.tokenizer import Tokenizer

_FIRST_RANK = 0
_R = TypeVar("_R", bound=m.Result)
log = logging.getLogger(__name__)


class _Stream(asyncio.Queue[m.RequestReport]):
    """What is reported of one request; ``adapter`` is the name of the one it uses."""

    def __init__(self, adapter: str) -> None:
        super().__init__()
        self.adapter = adapter


class Engine:
    """One engine with all its ranks. Lives on one event loop and never blocks it."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, settings: CoreSettings) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.settings = settings
        self._streams: dict[str, _Stream] = {}
        self._abandoned: set[asyncio.Task[None]] = set()
        self._checkpoint: Path
        self._deadlines: dict[str, float] = {}
        self._worker = WORKER
        self._supervisor: Supervisor
        self._starting: asyncio.Task[Supervisor] | None = None
        self._closed = False
        self._holdings = Holdings()
        # Told what becomes of the blocks that later prompts can find, in order.
        self.on_cache: Callable[[CacheChanged], None] = lambda _changed: None
        self.adapters = AdapterTable(lambda: self._holdings.adapters, self._users_of)

    @classmethod
    async def start(
        cls,
        checkpoint: Path,
        settings: CoreSettings,
        *,
        startup_deadline_s: float = 300.0,
        order_deadline_s: float = 60.0,
        step_deadline_s: float = 60.0,
        watch_interval_s: float = 1.0,
        worker: str = WORKER,
    ) -> Engine:
        """Load and start; raises CheckpointError or StartupFailed, with nothing left running.
        For the deadlines and ``worker`` see :meth:`Supervisor.start`."""
        config = await asyncio.to_thread(read_config, checkpoint)
        tokenizer = await asyncio.to_thread(Tokenizer.load, checkpoint)
        engine = cls(config, tokenizer, settings)
        engine._checkpoint = checkpoint
        engine._deadlines = {
            "startup_deadline_s": startup_deadline_s,
            "order_deadline_s": order_deadline_s,
            "step_deadline_s": step_deadline_s,
            "watch_interval_s": watch_interval_s,
        }
        engine._worker = worker
        engine._supervisor = await engine._start_group(None)
        sums = tuple(one.weights_sha256 for one in engine._supervisor.ready)
        engine._holdings = Holdings(sha256=sums)
        return engine

    async def _start_group(self, earlier: dict[int, m.EarlierWeights] | None) -> Supervisor:
        return await Supervisor.start(
            self._checkpoint,
            self.settings,
            on_report=self._deliver,
            on_cache=lambda changed: self.on_cache(changed),
            on_lost=self._rank_lost,
            earlier=earlier,
            worker=self._worker,
            **self._deadlines,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._supervisor.log.ranks

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that are gone, with the cause: none or all, since they do not go on without one
        another. While they are gone nothing is served."""
        return self._supervisor.log.lost

    @property
    def blamed(self) -> tuple[int, ...]:
        """Of the lost ranks those that were the reason."""
        return self._supervisor.blamed

    async def until_lost(self) -> None:
        """Returns when ranks are lost; at once, if they are already."""
        await self._supervisor.until_lost()

    @property
    def holdings(self) -> Holdings:
        """What the ranks hold as of the last change that was settled; while ranks are lost, what a
        restart goes back to."""
        return self._holdings

    @property
    def ready(self) -> m.Ready:
        """Sizes that the first rank reported."""
        return self._supervisor.ready[_FIRST_RANK]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order."""
        return tuple(one.pid for one in self._supervisor.ready)

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids whose end has not been reported yet."""
        return tuple(self._streams)

    async def generate(self, request: m.GenerationRequest) -> AsyncGenerator[m.RequestReport, None]:
        """The request's reports, the last of which is Finished or Failed.

        The order log has the request before the iterator suspends for the first time. Closing it
        early ends the request in the engine, and returns when that is done. Raises
        DuplicateRequest, UnknownAdapter, Overloaded or RankLost before the first report.
        """
        request_id = request.request_id
        if request_id in self._streams:
            raise DuplicateRequest(request_id)
        if request.adapter:
            self.adapters.admit(request.adapter)
        stream = _Stream(request.adapter)
        self._streams[request_id] = stream
        ended = False
        try:
            result = await self._order(m.Submit(request))
            if isinstance(result, m.Submitted) and result.status is not m.SubmitStatus.ACCEPTED:
                ended = True
                self._streams.pop(request_id, None)
                raise self._refusal(request_id, result)
            while not ended:
                report = await stream.get()
                ended = not isinstance(report, m.Tokens)
                yield report
        finally:
            if not ended:
                # Shielded, and remembered by the loop: whoever cancels twice does not undo it.
                await asyncio.shield(self._abandon(request_id, stream))

    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> m.Aborted:
        """End the named requests, None: all. Their last reports are out when this returns."""
        order = m.Abort(request_ids=request_ids, message=message)
        return _expect(await self._order(order), m.Aborted)

    async def load(self) -> m.LoadNumbers:
        return _expect(await self._order(m.ReadLoad()), m.LoadNumbers)

    async def flush_prefix_cache(self) -> m.PrefixFlushed:
        return _expect(await self._order(m.FlushPrefixCache()), m.PrefixFlushed)

    async def set_gate(self, order: m.SetGate) -> m.GateSet:
        return _expect(await self._order(order), m.GateSet)

    async def probe(self) -> None:
        """One forward pass; raises OrderRejected or RankLost when it is not possible."""
        await self._order(m.Probe())

    def change(self, order: c.Preparation, *, prepare_deadline_s: float = 1800.0) -> Change:
        """Begin a release, a restore or an update of weights. Nothing is sent before the first
        call of ``prepare``. One at a time: it has to be concluded or rolled back on every rank."""
        return Change(
            order,
            self.ranks,
            self.issue,
            self._changed,
            prepare_deadline_s=prepare_deadline_s,
            order_deadline_s=self._supervisor.order_deadline_s,
        )

    def issue(self, order: m.Order) -> Issued:
        """Put an order in the log for all ranks; for callers that follow each rank themselves."""
        return self._supervisor.log.issue(order)

    async def ack(self, issued: Issued, rank: int) -> m.Result:
        """One rank's answer within the order deadline. Raises OrderRejected or RankLost."""
        return await issued.ack(rank, self._supervisor.order_deadline_s)

    async def restart(self, gate: m.Gate = m.Gate.OPEN) -> None:
        """Start all ranks anew after a loss, with the gate as said; nothing happens without one.

        What the lost ranks had in flight is gone: requests have ended, and the KV cache is empty.
        Weights are read again from the source of the last settled update, and only those count
        that have the checksum which each rank had then. Where they can not be had so (the files
        are gone or others, or the tensors came through memory), the weights are missing on all
        ranks, and an update has to bring some. What was released is released again.

        Raises StartupFailed, RankLost or OrderRejected, and the ranks are lost still or again; it
        may be tried again.
        """
        if not self.lost or self._starting is not None:
            return
        await self._supervisor.close()
        before = self._holdings
        self._starting = asyncio.create_task(self._start_group(before.earlier()))
        try:
            supervisor = await self._starting
        except asyncio.CancelledError:
            if not self._closed:
                self._starting.cancel()
                raise
            raise StartupFailed("the engine is shutting down") from None
        finally:
            self._starting = None
        self._supervisor = supervisor
        try:
            await self._set_up_again(before)
            if gate is not m.Gate.OPEN:
                await self.set_gate(m.SetGate(gate=gate))
        except (RankLost, OrderRejected):
            # Ranks that are neither as before nor missing their weights together serve nothing.
            await supervisor.close()
            self._holdings = before
            raise

    async def _set_up_again(self, before: Holdings) -> None:
        """Bring the ranks of a new group to one state: the earlier one, as far as it can be had."""
        self._holdings = replace(before, released={}, adapters=())
        sums = tuple(one.weights_sha256 for one in self._supervisor.ready)
        if not all(sums):
            # Some may have found theirs: a part of a model is nothing.
            await self._change_all({c.Resource.WEIGHTS: False})
            order = c.PrepareRestore(change_id=uuid4().hex, resources=(c.Resource.WEIGHTS,))
            await self.carry_out(order)
        else:
            await self._load_again(before.adapters)
        if before.released:
            await self._change_all(before.released)

    async def _load_again(self, adapters: tuple[LoadedAdapter, ...]) -> None:
        """Those whose files are still there, and what they were."""
        for adapter in adapters:
            try:
                await self.carry_out(PrepareLoad(change_id=uuid4().hex, adapter=adapter))
            except OrderRejected as error:
                log.warning("adapter %r is lost with the ranks: %s", adapter.name, error)

    async def _change_all(self, released: Mapping[c.Resource, bool]) -> None:
        for resource, preserve in released.items():
            await self.carry_out(
                c.PrepareRelease(change_id=uuid4().hex, resources=(resource,), preserve=preserve)
            )

    async def carry_out(self, order: c.Preparation) -> ChangeOutcome:
        """A change on all ranks, all phases; rolled back when a rank refuses. Raises OrderRejected
        with nothing changed, or RankLost."""
        change = self.change(order)
        try:
            await asyncio.gather(*(change.prepare(rank) for rank in self.ranks))
            await asyncio.gather(*(change.commit(rank) for rank in self.ranks))
        except OrderRejected:
            await asyncio.gather(*(change.rollback(rank) for rank in self.ranks))
            raise
        return await change.conclude()

    async def close(self) -> None:
        """End everything. Open streams end with Failed."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        await self._supervisor.close()
        self._fail_all("the engine is shutting down")
        await asyncio.gather(*self._abandoned)

    async def _order(self, order: m.Order) -> m.Result:
        """Carry an order out on all ranks; the first rank's result stands for all."""
        issued = self.issue(order)
        results = await asyncio.gather(*(self.ack(issued, rank) for rank in self.ranks))
        return results[0]

    def _users_of(self, adapter: str) -> int:
        return sum(1 for stream in self._streams.values() if stream.adapter == adapter)

    def _deliver(self, report: m.RequestReport) -> None:
        request_id = report.request_id
        if isinstance(report, m.Tokens):
            stream = self._streams.get(request_id)
        else:
            stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.put_nowait(report)

    def _changed(self, order: c.Preparation, outcome: ChangeOutcome) -> None:
        self._holdings = self._holdings.after(order, outcome)

    def _rank_lost(self, rank: int, cause: str) -> None:
        self.on_cache(CacheChanged((CacheCleared(),)))
        self._fail_all(f"rank {rank} of the engine was lost: {cause}")

    def _fail_all(self, message: str) -> None:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.put_nowait(m.Failed(request_id=request_id, message=message, retryable=True))

    def _abandon(self, request_id: str, stream: _Stream) -> asyncio.Task[None]:
        """The caller went away. The id stays taken until the engine has ended the request, or a
        new request of that id would be given the old one's last tokens."""
        task = asyncio.create_task(self._end_abandoned(request_id, stream))
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
        return task

    async def _end_abandoned(self, request_id: str, stream: _Stream) -> None:
        with suppress(RankLost, OrderRejected):
            await self.abort((request_id,), "the caller went away")
        # Nothing else frees an id whose submission was refused or lost. By now the id can belong
        # to a newer request, though.
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]

    @staticmethod
    def _refusal(request_id: str, result: m.Submitted) -> ReferenceEngineError:
        if result.status is m.SubmitStatus.DUPLICATE:
            return DuplicateRequest(request_id)
        if result.status is m.SubmitStatus.UNKNOWN_ADAPTER:
            return UnknownAdapter()
        return Overloaded("too many requests are waiting")


def _expect(result: m.Result, kind: type[_R]) -> _R:
    if not isinstance(result, kind):
        raise TypeError(f"a rank answered {type(result).__name__} for {kind.__name__}")
    return result
