"""An engine that speaks `openengine.v1` itself behind the administration kit's port: what its
`Control` service has, with keys, records and tokens in front of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from app.domain.capabilities import Capabilities
from app.domain.commands import Pause, Resume
from app.domain.facts import WeightsFact
from app.domain.kinds import AbortOutcome, PauseMode, WeightsState
from app.domain.ranks import RankReport, RankState
from app.enginekit.runtime import (
    AbortTally,
    Conclusion,
    EngineDescription,
    Holding,
    Load,
    Observation,
    Order,
    RankLoad,
    RuntimeFault,
)
from app.rpc.openengine.v1 import generation_pb2, lifecycle_pb2, server_pb2
from app.sidecars.carried import Carried
from app.sidecars.carrying import CarryingRuntime
from app.sidecars.faults import told
from app.sidecars.http import CallError, NoAnswer, Refused
from app.sidecars.native.client import NativeClient
from app.sidecars.native.discovery import Discovered, capabilities_of, describe
from app.sidecars.native.relayed import Relay, Relays
from app.sidecars.watching import Orders, Watch

_H = lifecycle_pb2.HealthState
_S = lifecycle_pb2.AbortStatus
_SERVES = frozenset({_H.HEALTH_STATE_READY, _H.HEALTH_STATE_DEGRADED, _H.HEALTH_STATE_DRAINING})
_PROBE_S = 40.0  # of an engine that waits for its own probe for 30 s
_ENDED = "the engine was paused, which ended all requests in flight"


class NativeWatch(Watch):
    """`only_way`: as of the offer."""

    def __init__(
        self, client: NativeClient, found: Discovered, look_s: float, *, only_way: bool
    ) -> None:
        super().__init__(look_s)
        self._client = client
        self._found = found
        self._only_way = only_way
        self._draining = False
        self._was_lost = False

    async def lost(self) -> str | None:
        try:
            health = await self._client.health()
            if self._was_lost and await self._another():
                return "the engine was started anew"
        except CallError as error:
            self._was_lost = True
            return error.message
        self._was_lost = health.state not in _SERVES
        self._draining = health.state == _H.HEALTH_STATE_DRAINING
        return "the engine is not ready" if self._was_lost else None

    async def look(self, orders: Callable[[], Orders]) -> bool:
        del orders
        with told():
            await self._another()
        return True

    async def _another(self) -> bool:
        """Asked for seldom: it costs the engine more than its health does. Raises CallError."""
        if not self._found.is_of(await self._client.server_info()):
            self.restarted.set()
        return self.restarted.is_set()

    def seen(self, lost: str | None) -> Observation:
        """One that drains takes no new requests, whoever told it so."""
        holding = None if self._only_way else Holding(None)
        if self._draining:
            holding = Holding(PauseMode.DRAIN)
        state = WeightsState.VALID if lost is None else WeightsState.UNKNOWN
        return Observation(
            weights=WeightsFact(state=state),
            ranks=()
            if lost is None
            else tuple(
                RankReport(rank, RankState.FAILED, lost) for rank in range(self._found.world_size)
            ),
            group=self._group,
            holding=holding,
        )


class CarriedPause(Carried):
    """The gate holds new requests back; what runs is the kit's to wait for, or ended here."""

    def __init__(self, order: Order, command: Pause, relays: Relays) -> None:
        super().__init__(order)
        self._mode = command.mode
        self._relays = relays
        self._mine: tuple[Relay, ...] = ()

    async def commit(self) -> None:
        if self._mode is PauseMode.ABORT:
            self._mine = tuple(self._relays.running.values())
            await self._relays.end(self._mine, _ENDED)

    async def conclude(self) -> Conclusion:
        return Conclusion(requests_aborted=sum(one.aborted for one in self._mine))


class NativeRuntime(CarryingRuntime):
    """Implements ``app.enginekit.runtime.Runtime`` for one life of an engine."""

    harmless = (Carried,)

    def __init__(
        self, client: NativeClient, found: Discovered, watch: NativeWatch, *, only_way: bool
    ) -> None:
        super().__init__(watch)
        self._client = client
        self._found = found
        self._only_way = only_way
        self._relays = Relays(client)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self._found.world_size))

    def describe(self) -> EngineDescription:
        return describe(self._found)

    def capabilities(self) -> Capabilities:
        return capabilities_of(self._found, only_way=self._only_way)

    async def load(self) -> Load:
        with told():
            return load_of(await self._client.load())

    def made(self, order: Order) -> Carried:
        match order.command:
            case Pause() as command:
                return CarriedPause(order, command, self._relays)
            case Resume():
                return Carried(order)
        raise RuntimeFault("UNSUPPORTED_OPERATION", f"{order.command.kind.value} is not offered")

    def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        return self._relays.generate(request)

    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> AbortTally:
        running = self._relays.running
        if request_ids is None:
            await self._abort_all(tuple(running.values()), message)
            return AbortTally({name: self._relays.outcome_of(one) for name, one in running.items()})
        mine = [running[name] for name in request_ids if name in running]
        await self._relays.end(mine, message)
        outcomes = {one.request_id: self._relays.outcome_of(one) for one in mine}
        for name in request_ids:
            if name not in outcomes:
                outcomes[name] = await self._abort_other(name)
        return AbortTally(outcomes)

    async def _abort_all(self, running: tuple[Relay, ...], message: str) -> None:
        named = [relay for relay in running if relay.why is None]
        for relay in named:
            relay.why = message
        every = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
        try:
            with told():
                await self._client.abort(every, self._client.patience.control_s)
        except RuntimeFault as fault:
            if isinstance(fault.__cause__, Refused):  # what they come to is their own again
                for relay in named:
                    relay.why = None
            raise
        await self._relays.end(running, message)

    async def _abort_other(self, request_id: str) -> AbortOutcome:
        """Of one that did not come through here, or is over. Such engines say of an id that they
        never had what they say of one that is over."""
        if self._relays.went(request_id):
            return AbortOutcome.ALREADY_FINISHED
        request = lifecycle_pb2.AbortRequest(request_id=request_id)
        try:
            with told():
                answer = await self._client.abort(request, self._client.patience.control_s)
        except RuntimeFault as fault:
            if isinstance(fault.__cause__, NoAnswer):
                return AbortOutcome.UNVERIFIED
            raise
        if answer.status == _S.ABORT_STATUS_ABORTED:
            return AbortOutcome.ABORTED
        return AbortOutcome.NOT_FOUND if self._only_way else AbortOutcome.ALREADY_FINISHED

    async def probe(self) -> None:
        try:
            health = await self._client.health(probe=True, within_s=_PROBE_S)
        except CallError as error:
            raise RuntimeFault("CANNOT_SERVE", error.message) from error
        if health.state not in _SERVES or health.state == _H.HEALTH_STATE_DEGRADED:
            raise RuntimeFault("CANNOT_SERVE", "the engine's own probe did not come through")


def load_of(load: server_pb2.LoadInfo) -> Load:
    return Load(
        running_requests=load.running_requests,
        queued_requests=load.queued_requests,
        used_kv_blocks=load.used_kv_blocks,
        total_kv_blocks=load.total_kv_blocks,
        running_tokens=load.running_tokens,
        waiting_tokens=load.waiting_tokens,
        prefill_batch_size=load.prefill_batch_size,
        decode_batch_size=load.decode_batch_size,
        ranks=tuple(
            RankLoad(
                data_parallel_rank=rank.data_parallel_rank,
                running_requests=rank.running_requests,
                queued_requests=rank.queued_requests,
                used_kv_blocks=rank.used_kv_blocks,
                total_kv_blocks=rank.total_kv_blocks,
            )
            for rank in load.ranks
        ),
    )
