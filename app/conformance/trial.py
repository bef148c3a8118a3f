"""What a case works with: clients, orders that fit the engine, traffic, faults; and the way back
to the state that the engine was found in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from app.conformance.case import NotApplicable, NotHeld, NotPromised, expect
from app.conformance.client import Client, Stream, brief, ends_with
from app.conformance.connection import Listener
from app.conformance.hook import FaultHook, HookFailed
from app.conformance.orders import Kind, Orders, name_of, named
from app.conformance.placing import Places
from app.conformance.record import Record, Refusal, Told
from app.conformance.stock import Stock
from app.conformance.traffic import Generation, TooShort, Traffic
from app.conformance.way_back import Unsettled, WayBack, why_not_begun
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import server_pb2

# How long the requests last that orders are given in the midst of, and that run to their end.
IN_THE_MIDST_S = 2.0
LONG_S = 60.0
_BEGINS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`patience_s` bounds every wait for something that a right engine does in far less time;
    `time_limit_s` the whole run but for the way back; `wait_s` how long nobody need be there."""

    admin: Listener
    inference: Listener | None = None
    hook: FaultHook | None = None
    destructive: bool = False
    weights: str | None = None  # a path that the engine can load from disk
    weights_copy: Path | None = None  # the same, where this process can read them
    lora: str | None = None  # a path from which the engine can load an adapter
    places: Places = field(default_factory=Places)
    refused_tokens: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # label and token
    patience_s: float = 60.0
    time_limit_s: float | None = None
    wait_s: float = 0.0
    secrets: tuple[str, ...] = field(default=(), repr=False)


class TargetRefused(Exception):
    """The suite cannot begin. One line; `answered` False: nobody is there."""

    def __init__(self, line: str, *, answered: bool = True) -> None:
        super().__init__(line)
        self.answered = answered


class Trial:
    """One run against one engine. Use `open` and `close`."""

    def __init__(self, options: Options, run_id: str) -> None:
        self.options = options
        self.patience_s = options.patience_s
        self.prefix = f"conformance-{run_id}"
        self.canary = f"canary-{run_id}-not-to-be-repeated"
        tokens = (options.admin.token, options.inference.token if options.inference else None)
        secrets = {*(token for token in tokens if token), self.canary, *options.secrets}
        secrets |= {token for _, token in options.refused_tokens}
        self.record = Record(secrets)
        self._keys = 0
        self._clients: list[Client] = []
        self.client = self.connect()
        self._traffic: Traffic | None = None
        self.broken = False  # a fault was made that only a restart mends
        self.altered = False  # other weights than those given may be loaded
        self.most_ranks = 0  # that the engine has had in this run
        self.running_limit = 0  # requests; 0: discovery does not say
        self.lora_limit = 0  # adapters; the same
        self.tensor_parallel_size = 0  # the same
        self.start = pb.AdminProfile()
        self.profile = pb.AdminProfile()
        self.orders = Orders(self.profile, self.key)
        self.stock = Stock(self)
        self._way_back = WayBack(self)

    def connect(self) -> Client:
        """A further client, with a connection of its own."""
        client = Client(self.options.admin, self.record, self.patience_s)
        self._clients.append(client)
        return client

    async def open(self) -> None:
        """Raises TargetRefused where nothing may be tried."""
        answer = await self._once_up(lambda: self.client.ask(pb.GetAdminProfileRequest()))
        if isinstance(answer, Refusal):
            raise TargetRefused(_why_refused(answer), answered=not answer.of_transport)
        if (line := why_not_begun(answer)) is not None:
            raise TargetRefused(line)
        self.start = answer
        self.know(answer)
        info = await self.client.of_control("GetServerInfo", server_pb2.GetServerInfoRequest())
        if not isinstance(info, Refusal):
            self.running_limit = info.capacity.max_running_requests
            self.lora_limit = info.capacity.max_loras
            self.tensor_parallel_size = info.parallelism.tensor_parallel_size
        if self.options.inference is not None:
            await self._meet(self.options.inference)

    async def _meet(self, inference: Listener) -> None:
        client = Client(inference, Record(()), self.patience_s)
        request = server_pb2.GetServerInfoRequest()
        try:
            answer = await self._once_up(lambda: client.of_control("GetServerInfo", request))
        finally:
            await client.close()
        if isinstance(answer, Refusal) and answer.of_transport:
            raise TargetRefused(f"--inference {inference.address}: {answer}", answered=False)

    async def _once_up(self, asked: Callable[[], Awaitable[Any]]) -> Any:
        """What it answers, or after `wait_s` that nobody does: who started it a moment ago has no
        other way to know when it listens."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.options.wait_s
        while True:
            answer = await asked()
            if not (isinstance(answer, Refusal) and answer.of_transport) or loop.time() > until:
                return answer
            self.record.overlook()
            await asyncio.sleep(0.05)

    def know(self, profile: pb.AdminProfile) -> None:
        self.profile = profile
        self.most_ranks = max(self.most_ranks, int(profile.world_size))
        self.orders = Orders(profile, self.key)

    async def close(self) -> None:
        if self._traffic is not None:
            await self._traffic.close()
        for client in self._clients:
            await client.close()

    def key(self) -> str:
        self._keys += 1
        return f"{self.prefix}-{self._keys}"

    @property
    def traffic(self) -> Traffic:
        if self._traffic is None:
            assert self.options.inference is not None, "the case did not say that it needs it"
            self._traffic = Traffic(self.options.inference, self.record, self.patience_s)
        return self._traffic

    # ---- what is offered ----

    def offers(self, kind: Kind) -> bool:
        return any(support.kind == kind for support in self.profile.operations)

    def require(self, *kinds: Kind) -> None:
        """Raises NotApplicable."""
        missing = [name_of(kind) for kind in kinds if not self.offers(kind)]
        if missing:
            raise NotPromised(f"the profile does not offer {', '.join(missing)}")

    def require_pauses(self, *modes: pb.PauseMode.ValueType) -> None:
        self.require(pb.ADMIN_OPERATION_KIND_PAUSE, pb.ADMIN_OPERATION_KIND_RESUME)
        for mode in modes:
            if mode not in self.profile.pause_modes:
                name = named(pb.PauseMode, mode).removeprefix("PAUSE_MODE_").lower()
                raise NotPromised(f"the profile does not offer pause mode {name}")

    def pause(self, **fields: Any) -> pb.PauseRequest:
        """In the first mode that is offered."""
        self.require_pauses()
        if not self.profile.pause_modes:
            raise NotPromised("the profile offers no pause mode")
        return self.orders.pause(self.profile.pause_modes[0], **fields)

    def flush(self, **fields: Any) -> pb.FlushCachesRequest:
        self.require(pb.ADMIN_OPERATION_KIND_FLUSH_CACHES)
        return self.orders.flush(**fields)

    def order(self, **fields: Any) -> Any:
        """A valid order with an effect that can be taken back; for an engine that cannot be
        paused, a flush."""
        if self.offers(pb.ADMIN_OPERATION_KIND_PAUSE) and self.profile.pause_modes:
            return self.pause(**fields)
        if self.offers(pb.ADMIN_OPERATION_KIND_FLUSH_CACHES):
            return self.flush(**fields)
        raise NotPromised("the profile offers neither pause nor flush_caches")

    # ---- state ----

    async def resumed(self) -> pb.OperationCompleted:
        """Lift the pause that holds. Raises NotHeld when that cannot be done."""
        epoch = (await self.client.profile()).pause_epoch
        return await self.client.completed(self.orders.resume(epoch))

    @asynccontextmanager
    async def paused(self, **fields: Any) -> AsyncGenerator[pb.OperationCompleted]:
        """Under a pause; `mode` may be given."""
        request = self.orders.pause(**fields) if "mode" in fields else self.pause(**fields)
        yield await self.client.completed(request)
        await self.resumed()

    @asynccontextmanager
    async def unchanged(self, by: str) -> AsyncGenerator[None]:
        """Raises NotHeld when the administrative state differs afterwards."""
        before = state_of(await self.client.profile())
        yield
        after = state_of(await self.client.profile())
        differing = [name for name in before if before[name] != after[name]]
        expect(
            not differing,
            f"nothing to be changed by {by}",
            "; ".join(f"{name}: {before[name]} before, {after[name]} after" for name in differing),
        )

    @asynccontextmanager
    async def draining(self, **fields: Any) -> AsyncGenerator[tuple[Stream, str, Generation]]:
        """While a drain waits for a request: its stream, its operation id, the request.

        Raises TooShort when requests end too soon for that.
        """
        self.require_pauses(pb.PAUSE_MODE_DRAIN)
        async with self.traffic.running(LONG_S) as generation:
            stream = self.client.send(self.orders.pause(pb.PAUSE_MODE_DRAIN, **fields))
            first = await stream.first()
            await self.until_draining(generation)
            yield stream, first.operation_id, generation
        await stream.rest()

    @asynccontextmanager
    async def outlasted(
        self, deadline_ms: int, **fields: Any
    ) -> AsyncGenerator[tuple[Told, Generation]]:
        """After a drain with too little time for a request that goes on: what the drain told, and
        the request. Raises TooShort when requests end too soon for that."""
        self.require_pauses(pb.PAUSE_MODE_DRAIN)
        async with self.traffic.running(LONG_S) as generation:
            drain = self.orders.pause(pb.PAUSE_MODE_DRAIN, deadline_ms=deadline_ms, **fields)
            until = asyncio.get_running_loop().time() + deadline_ms / 1000
            told = await self.client.told(drain)
            if generation.ended_at is not None and generation.ended_at < until:
                raise TooShort
            expect(ends_with(told, "failed"), "the drain to fail at its deadline", told)
            yield told, generation

    async def until_draining(self, generation: Generation) -> None:
        """An order is taken on a moment before it begins. Raises TooShort when the request
        has ended meanwhile, NotHeld when admission does not become DRAINING."""
        loop = asyncio.get_running_loop()
        until = loop.time() + max(_BEGINS_S, self.patience_s / 4)
        while True:
            admission = (await self.client.profile()).state.admission
            if generation.end is not None:
                raise TooShort
            if admission == pb.ADMISSION_STATE_DRAINING:
                return
            if loop.time() > until:
                raise NotHeld(
                    "admission to be DRAINING while a drain waits for a request",
                    named(pb.AdmissionState, admission),
                )
            await asyncio.sleep(0.01)

    # ---- faults ----

    async def fault(self, *words: str) -> None:
        """Call the hook. What it breaks is mended by a restart when the case has ended.

        Raises NotHeld when it fails; NotApplicable when it does not stop the only rank, which may
        be the process that would have to answer for it.
        """
        assert self.options.hook is not None, "the case did not say that it needs it"
        self.broken = words[0] != "restart"
        try:
            await self.options.hook.run(*words)
        except HookFailed as failed:
            if failed.declined and words[0] == "stop-rank" and self.profile.world_size == 1:
                raise NotApplicable(
                    f"the engine has one rank, and the fault hook does not stop it: {failed}"
                ) from failed
            raise NotHeld("the fault hook to do what it is asked", str(failed)) from failed

    async def restart(self) -> pb.AdminProfile:
        """A new life of the engine; returns its first profile. Raises NotHeld."""
        await self.fault("restart")
        if self._traffic is not None:
            self._traffic.hang_up()
        return await self._answering()

    async def _answering(self) -> pb.AdminProfile:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.patience_s
        while True:
            answer = await self.client.ask(pb.GetAdminProfileRequest())
            if not isinstance(answer, Refusal):
                self.know(answer)
                return self.profile
            self.record.overlook()
            if loop.time() > until:
                raise NotHeld(
                    f"the engine to answer within {self.patience_s:g} s of a restart", str(answer)
                )
            await asyncio.sleep(0.05)

    # ---- the way back ----

    async def settle(self) -> None:
        """Back to open admission with nothing running. Raises Unsettled."""
        if self._traffic is not None:
            self._traffic.hang_up()
        try:
            await self._way_back.take()
        except NotHeld as failed:
            raise Unsettled(str(failed)) from failed


_HINTS = {
    grpc.StatusCode.UNIMPLEMENTED: "there is no OpenEngineAdmin; is this the admin listener?",
    grpc.StatusCode.UNAUTHENTICATED: "it asks for a token: --token-file",
    grpc.StatusCode.PERMISSION_DENIED: "this token may not administer it",
}


def _why_refused(refusal: Refusal) -> str:
    hint = _HINTS.get(refusal.code)
    return f"GetAdminProfile: {refusal}{f'; {hint}' if hint else ''}"


def state_of(profile: pb.AdminProfile) -> dict[str, Any]:
    """The administrative facts that an order can change, comparable and readable."""
    state = profile.state
    return {
        "revision": profile.revision,
        "pause epoch": profile.pause_epoch,
        "release epoch": profile.release_epoch,
        "admission": named(pb.AdmissionState, state.admission),
        "pause": (state.pause.operation_id, named(pb.PauseMode, state.pause.mode)),
        "released": [named(pb.ResourceKind, kind) for kind in state.released],
        "weights": brief(state.weights),
        "role": state.role,
        "adapters": [adapter.lora_name for adapter in state.loras],
        "open operations": [operation.operation_id for operation in state.open_operations],
    }


@asynccontextmanager
async def opened(options: Options, new_id: Callable[[], str]) -> AsyncGenerator[Trial]:
    """A trial that ends with the engine as it was found, also when it is cancelled.

    Raises TargetRefused at the start, Unsettled at the end.
    """
    async with AsyncExitStack() as stack:
        trial = Trial(options, new_id())
        stack.push_async_callback(trial.close)
        await trial.open()
        try:
            yield trial
        finally:
            await trial.settle()
