"""The front end's view of the engine: requests as streams of reports, orders as coroutines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

from app.reference_engine import change_orders as c
from app.reference_engine import messages as m
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
from app.reference_engine.group import Group, GroupStart
from app.reference_engine.handoff_messages import DeliverKv, KvSource
from app.reference_engine.limits import CoreSettings
from app.reference_engine.nursery import Nursery
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

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer, start: GroupStart, own: Nursery
    ) -> None:
        """``own`` ends with it, whether it is the one in ``start`` or not."""
        self._own = own
        self.config = config
        self.tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}
        self._abandoned: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._common = start
        self._numbers = count(1)
        self._group: Group
        self._starting: asyncio.Task[None] | None = None
        self._closed = False
        self._moved = asyncio.Event()
        self._down = asyncio.Event()
        # Told what becomes of the blocks that later prompts can find, in order.
        self.on_cache: Callable[[CacheChanged], None] = lambda _changed: None
        self.adapters = AdapterTable(lambda: self._group.holdings.adapters, self._users_of)

    @classmethod
    async def start(
        cls,
        checkpoint: Path,
        settings: CoreSettings,
        *,
        nursery: Nursery | None = None,
        **deadlines: float,
    ) -> Engine:
        """Load and start; raises CheckpointError or StartupFailed, with nothing left running.
        For the deadlines see :meth:`Supervisor.start`. ``nursery``: where its ranks come from,
        if others use it too; else it has one of its own."""
        config = await asyncio.to_thread(read_config, checkpoint)
        tokenizer = await asyncio.to_thread(Tokenizer.load, checkpoint)
        own = Nursery()
        common = GroupStart(checkpoint=checkpoint, deadlines=deadlines, nursery=nursery or own)
        engine = cls(config, tokenizer, common, own)
        try:
            engine._take(await engine._start_group(settings))
        except BaseException:
            own.close()
            raise
        return engine

    async def _start_group(
        self, settings: CoreSettings, earlier: Mapping[int, m.FirstWeights] | None = None
    ) -> Group:
        return await Group.start(self._common, settings, next(self._numbers), earlier)

    def _take(self, group: Group) -> None:
        """That one serves from now on."""
        self._group = group
        group.on_report, group.on_lost = self._deliver, self._rank_lost
        group.on_cache = lambda changed: self.on_cache(changed)
        self._moved.set()
        if not group.lost:
            self._down.clear()

    @property
    def group(self) -> Group:
        """The ranks that serve, or that did and are lost."""
        return self._group

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def settings(self) -> CoreSettings:
        return self._group.settings

    async def moved(self) -> None:
        """Returns when ranks were lost or came since the last call. For one caller at a time."""
        await self._moved.wait()
        self._moved.clear()

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._group.ranks

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that are gone, with the cause: none or all, since they do not go on without one
        another. While they are gone nothing is served."""
        return self._group.lost

    @property
    def blamed(self) -> tuple[int, ...]:
        """Of the lost ranks those that were the reason."""
        return self._group.blamed

    @property
    def holdings(self) -> Holdings:
        """What the ranks hold as of the last change that was settled; while ranks are lost, what a
        restart goes back to."""
        return self._group.holdings

    @property
    def ready(self) -> m.Ready:
        """Sizes that the first rank reported."""
        return self._group.ready[_FIRST_RANK]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order."""
        return tuple(one.pid for one in self._group.ready)

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids whose end has not been reported yet."""
        return tuple(self._streams)

    async def generate(
        self,
        request: m.GenerationRequest,
        bring_kv: Callable[[], Awaitable[KvSource]] | None = None,
    ) -> AsyncGenerator[m.RequestReport, None]:
        """The request's reports, the last of which is Finished, Failed or Prefilled.

        The order log has the request before the iterator suspends for the first time. Closing it
        early ends the request in the engine, and returns when that is done. Raises
        DuplicateRequest, UnknownAdapter, Overloaded or RankLost before the first report.

        ``bring_kv`` goes with ``awaits_kv``: called once the request is in the log, cancelled when
        the request ends meanwhile. What it raises ends the request; so does OrderRejected, for KV
        that other weights computed.
        """
        request_id = request.request_id
        if request_id in self._streams:
            raise DuplicateRequest(request_id)
        if request.adapter:
            self.adapters.admit(request.adapter)
        stream = _Stream(request.adapter)
        self._streams[request_id] = stream
        group = self._group
        ended = False
        try:
            result = await group.order(m.Submit(request))
            if isinstance(result, m.Submitted) and result.status is not m.SubmitStatus.ACCEPTED:
                ended = True
                self._streams.pop(request_id, None)
                raise self._refusal(request_id, result)
            first = (
                None if bring_kv is None else await self._bring(group, stream, request_id, bring_kv)
            )
            while not ended:
                report, first = first or await stream.get(), None
                ended = not isinstance(report, m.Tokens)
                yield report
        finally:
            if not ended:
                # Shielded, and remembered by the loop: whoever cancels twice does not undo it.
                await asyncio.shield(self._abandon(group, request_id, stream))

    async def _bring(
        self,
        group: Group,
        stream: _Stream,
        request_id: str,
        bring_kv: Callable[[], Awaitable[KvSource]],
    ) -> m.RequestReport | None:
        """Hand the ranks the KV that the request waits for; or, when it has ended before that was
        there, its last report."""
        coming = asyncio.ensure_future(bring_kv())
        ending = asyncio.ensure_future(stream.get())
        try:
            await asyncio.wait({coming, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A report that came at the same moment is not lost by cancelling.
            ending.cancel()
            coming.cancel()
            await asyncio.wait({coming, ending})
        failure = None if coming.cancelled() else coming.exception()
        if not ending.cancelled():
            return ending.result()
        if failure is not None:
            raise failure
        await group.order(DeliverKv(request_id, coming.result()))
        return None

    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> m.Aborted:
        """End the named requests, None: all. Their last reports are out when this returns."""
        order = m.Abort(request_ids=request_ids, message=message)
        return _expect(await self._group.order(order), m.Aborted)

    async def load(self) -> m.LoadNumbers:
        return (await self.load_and_memory())[0]

    async def load_and_memory(self) -> tuple[m.LoadNumbers, tuple[m.RankMemory, ...]]:
        """The memory of each rank, in rank order. The first one's stands in its load as well."""
        first, *others = await self._group.results(m.ReadLoad())
        load = _expect(first, m.LoadNumbers)
        memory = (load.memory, *(_expect(other, m.RankMemory) for other in others))
        return load, tuple(one for one in memory if one is not None)

    async def flush_prefix_cache(self) -> m.PrefixFlushed:
        return _expect(await self._group.order(m.FlushPrefixCache()), m.PrefixFlushed)

    async def set_gate(self, order: m.SetGate) -> m.GateSet:
        return _expect(await self._group.order(order), m.GateSet)

    async def probe(self) -> None:
        """One forward pass; raises OrderRejected or RankLost when it is not possible."""
        await self._group.order(m.Probe())

    def change(self, order: c.Preparation, *, prepare_deadline_s: float = 1800.0) -> Change:
        """See :meth:`Group.change`."""
        return self._group.change(order, prepare_deadline_s=prepare_deadline_s)

    async def carry_out(self, order: c.Preparation) -> ChangeOutcome:
        """See :meth:`Group.carry_out`."""
        return await self._group.carry_out(order)

    def issue(self, order: m.Order) -> Issued:
        """See :meth:`Group.issue`."""
        return self._group.issue(order)

    async def ack(self, issued: Issued, rank: int) -> m.Result:
        """See :meth:`Group.ack`."""
        return await self._group.ack(issued, rank)

    async def until_lost(self) -> None:
        """Returns at once while ranks are lost."""
        await self._down.wait()

    async def restart(self, gate: Callable[[], m.Gate] = lambda: m.Gate.OPEN) -> None:
        """Start all ranks anew after a loss, with the gate as wanted; nothing happens without one.
        Until they are all as they should be, the engine has none.

        What the lost ranks had in flight is gone: requests have ended, and the KV cache is empty.
        Weights are read again from the source of the last settled update, and only those count
        that have the checksum which each rank had then. Where they can not be had so (the files
        are gone or others, or the tensors came through memory), the weights are missing on all
        ranks, and an update has to bring some. What was released is released again.

        Raises StartupFailed, RankLost or OrderRejected, and the ranks are lost still; it may be
        tried again.
        """
        if not self.lost or self._starting is not None:
            return
        if self._closed:
            raise StartupFailed("the engine is shutting down")
        self._starting = asyncio.create_task(self._restart(gate))
        try:
            await self._starting
        except asyncio.CancelledError:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
            if not self._closed:
                raise
            raise StartupFailed("the engine is shutting down") from None
        finally:
            self._starting = None

    async def _restart(self, gate: Callable[[], m.Gate]) -> None:
        before = self._group
        await before.close(kill=True)
        holdings = before.seal()
        group = await self._start_group(before.settings, holdings.earlier())
        try:
            await group.set_up_like(holdings)
            await group.follow_gate(gate)
        except BaseException:
            await group.close(kill=True)
            raise
        self._take(group)

    async def beside(self, settings: CoreSettings, gate: Callable[[], m.Gate]) -> Group:
        """Another group that serves the live weights and adapters in another shape, with an empty
        cache; the present one goes on meanwhile. The caller closes it, or has it taken over.

        Raises StartupFailed, RankLost or OrderRejected, with nothing left running.
        """
        before = self._group
        holdings = before.holdings
        try:
            async with before.live_weights() as live:
                earlier = dict.fromkeys(range(settings.tensor_parallel_size), live)
                group = await self._start_group(settings, earlier)
        except OSError as error:
            raise StartupFailed(f"no memory to hand weights over ({error.strerror})") from error
        try:
            await group.set_up_like(holdings, all_of_it=True)
            await group.follow_gate(gate)
        except BaseException:
            await group.close(kill=True)
            raise
        return group

    def take_over(self, group: Group) -> None:
        """That one serves instead of the present one, which ends. Nothing may be in flight."""
        before = self._group
        before.dismiss()
        self._take(group)
        self.on_cache(CacheChanged((CacheCleared(),)))
        leaving = asyncio.create_task(before.close(), name="end the earlier ranks")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """End everything. Open streams end with Failed."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.gather(self._group.close(), *self._leaving)
        self._own.close()
        self._fail_all("the engine is shutting down")
        await asyncio.gather(*self._abandoned)

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

    def _rank_lost(self, rank: int, cause: str) -> None:
        self.on_cache(CacheChanged((CacheCleared(),)))
        self._moved.set()
        self._down.set()
        self._fail_all(f"rank {rank} of the engine was lost: {cause}")

    def _fail_all(self, message: str) -> None:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.put_nowait(m.Failed(request_id=request_id, message=message, retryable=True))

    def _abandon(self, group: Group, request_id: str, stream: _Stream) -> asyncio.Task[None]:
        """The caller went away. The id stays taken until the engine has ended the request, or a
        new request of that id would be given the old one's last tokens."""
        task = asyncio.create_task(self._end_abandoned(group, request_id, stream))
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
        return task

    async def _end_abandoned(self, group: Group, request_id: str, stream: _Stream) -> None:
        with suppress(RankLost, OrderRejected):
            message = "the caller went away"
            await group.order(m.Abort(request_ids=(request_id,), message=message))
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
