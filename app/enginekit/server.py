"""An engine's two listeners, from start to stop: what an engine's author calls."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import grpc

from app.auth.principal import AudienceKind
from app.domain.capabilities import Capabilities
from app.enginekit.adapter_calls import AdapterCalls
from app.enginekit.admin_service import AdminService
from app.enginekit.admission import AdmissionGate
from app.enginekit.auth import BearerInterceptor, Callers
from app.enginekit.control_service import ControlService
from app.enginekit.desk import OrderDesk
from app.enginekit.execution import ExecutionSettings
from app.enginekit.group_calls import GroupCalls
from app.enginekit.health import ADMIN, INFERENCE, VLLM_CONTROL, HealthBoard
from app.enginekit.inference_service import InferenceService
from app.enginekit.journal import Journal
from app.enginekit.listener import Listener
from app.enginekit.phases import Timings
from app.enginekit.profile import capabilities_of
from app.enginekit.runtime import Runtime, WatchedRuntime
from app.enginekit.settings import KitSettings, SettingsError, TlsFiles, Verifier
from app.enginekit.state import EngineState
from app.enginekit.store import StoreInUse, StoreUnreadable
from app.enginekit.tracing import traced_by
from app.enginekit.vllm_service import VllmControlService
from app.observability.spans import NO_TRACING, Tracing
from app.rpc.openengine.v1 import admin_pb2_grpc, openengine_pb2_grpc
from app.rpc.vllm import control_pb2_grpc as vllm_pb2_grpc

__all__ = [
    "EngineServer",
    "KitSettings",
    "SettingsError",
    "StoreInUse",
    "StoreUnreadable",
    "TlsFiles",
    "Verifier",
]

log = logging.getLogger(__name__)

_CONTROL = "openengine.v1.Control"


def utc_now() -> datetime:
    return datetime.now(UTC)


def random_id() -> str:
    return str(uuid.uuid4())


class EngineServer:
    """Serves `runtime`: `Inference` and the harmless part of `Control` on one listener,
    `OpenEngineAdmin` and all of `Control` on the other, gRPC health on both; `vllm.Control` on a
    third where it is wanted.

    One use: start once, stop once. Everything happens on the event loop that called `start`.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: KitSettings,
        *,
        now: Callable[[], datetime] = utc_now,
        new_id: Callable[[], str] = random_id,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """`interceptors` go before both listeners' services, behind the judging of tokens.
        `tracing`: continues the traces of callers; whoever opened it closes it after `stop`."""
        self._runtime = runtime
        self._tracing = tracing
        self._interceptors = (*traced_by(tracing), *interceptors)
        self._settings = settings
        self._now = now
        self._new_id = new_id
        self._callers = Callers()
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._served: _Served | None = None

    @property
    def inference_address(self) -> str:
        """As bound: `host:port` with the real port, or `unix:/path`. After `start`."""
        return self._running().inference.address

    @property
    def admin_address(self) -> str:
        return self._running().admin.address

    @property
    def vllm_control_address(self) -> str | None:
        """The same; None where it is not served."""
        listener = self._running().vllm
        return None if listener is None else listener.address

    @property
    def instance_id(self) -> str:
        """New at each start; begins with the identity of the store. After `start`."""
        return self._running().state.instance_id

    def _running(self) -> _Served:
        if self._served is None:
            raise RuntimeError("the engine server is not started")
        return self._served

    async def start(self) -> None:
        """Open the store, begin a new life in it, then listen.

        Operations that an earlier life left open end failed with ENGINE_RESTARTED. Raises
        StoreInUse when another process has the store, StoreUnreadable, or OSError for an address
        that is taken.
        """
        settings = self._settings
        journal, instance_id = await Journal.open(
            settings.data_dir,
            new_identity=self._new_id().replace("-", "")[:8],
            life=self._new_id(),
            now=self._now,
            keep=settings.operations_kept,
            retention=timedelta(milliseconds=settings.key_retention_ms),
        )
        try:
            self._served = await self._serve(journal, instance_id)
        except BaseException:
            await journal.close()
            raise

    async def _serve(self, journal: Journal, instance_id: str) -> _Served:
        settings = self._settings
        gate = AdmissionGate(max_held=settings.max_held_requests)
        state = EngineState(
            self._runtime,
            gate,
            journal,
            instance_id=instance_id,
            now=self._now,
            timeout_s=settings.runtime_timeout_s,
            default_hold_limit_ms=settings.default_hold_limit_ms,
        )
        desk = OrderDesk(
            self._runtime,
            state,
            ExecutionSettings(
                timings=Timings(
                    cancel_grace_s=settings.cancel_grace_s,
                    rollback_timeout_s=settings.rollback_timeout_s,
                    straggler_s=settings.straggler_s,
                ),
                progress_interval_s=settings.progress_interval_s,
                default_lease_ms=settings.default_lease_ms,
            ),
            capabilities=self._capabilities,
            new_id=self._new_id,
            tracing=self._tracing,
        )
        board = HealthBoard(state)
        state.changed = board.note
        adapters = AdapterCalls(desk, state, self._capabilities)
        inference = self._inference_listener(state, adapters, board)
        admin = self._admin_listener(state, desk, adapters, board)
        vllm = self._vllm_listener(state, desk, board)
        listeners = (inference, admin) if vllm is None else (inference, admin, vllm)
        await state.refresh()
        await board.publish()
        try:
            for listener in listeners:
                listener.bind()
            for listener in listeners:
                await listener.start()
        except BaseException:
            for listener in listeners:
                await listener.stop(0)
            raise
        background = (asyncio.create_task(board.run()), asyncio.create_task(self._observe(state)))
        return _Served(inference, admin, vllm, state, desk, board, background)

    def _capabilities(self) -> Capabilities:
        return capabilities_of(self._runtime, self._settings)

    def _inference_listener(
        self, state: EngineState, adapters: AdapterCalls, board: HealthBoard
    ) -> Listener:
        settings = self._settings
        listener = Listener(
            settings.inference_address,
            settings.inference_tls,
            interceptors=self._judging(settings.inference_verifier, AudienceKind.INFERENCE),
            max_message_bytes=settings.max_message_bytes,
        )
        service = InferenceService(self._runtime, state.gate, self._callers, self._new_id)
        openengine_pb2_grpc.add_InferenceServicer_to_server(service, listener.server)
        self._add_control(listener, state, adapters, admin=False)
        board.serve_on(listener.server)
        self._reflect(listener, INFERENCE, _CONTROL)
        return listener

    def _admin_listener(
        self, state: EngineState, desk: OrderDesk, adapters: AdapterCalls, board: HealthBoard
    ) -> Listener:
        settings = self._settings
        listener = Listener(
            settings.admin_address,
            settings.admin_tls,
            interceptors=self._judging(settings.admin_verifier, AudienceKind.ADMIN),
            max_message_bytes=settings.max_message_bytes,
        )
        groups = GroupCalls(self._runtime, desk, self._capabilities)
        service = AdminService(desk, state, self._callers, self._capabilities, groups)
        admin_pb2_grpc.add_OpenEngineAdminServicer_to_server(service, listener.server)
        self._add_control(listener, state, adapters, admin=True)
        board.serve_on(listener.server)
        self._reflect(listener, ADMIN, _CONTROL)
        return listener

    def _vllm_listener(
        self, state: EngineState, desk: OrderDesk, board: HealthBoard
    ) -> Listener | None:
        settings = self._settings
        if settings.vllm_control_address is None:
            return None
        listener = Listener(
            settings.vllm_control_address,
            None,
            interceptors=self._interceptors,
            max_message_bytes=settings.max_message_bytes,
        )
        service = VllmControlService(
            self._runtime,
            state,
            desk,
            capabilities=self._capabilities,
            timeout_s=settings.runtime_timeout_s,
        )
        vllm_pb2_grpc.add_ControlServicer_to_server(service, listener.server)
        board.serve_on(listener.server)
        self._reflect(listener, VLLM_CONTROL)
        return listener

    def _judging(
        self, verifier: Verifier | None, audience: AudienceKind
    ) -> tuple[grpc.aio.ServerInterceptor, ...]:
        if verifier is None:
            return self._interceptors
        return (BearerInterceptor(verifier, audience, self._callers), *self._interceptors)

    def _add_control(
        self, listener: Listener, state: EngineState, adapters: AdapterCalls, *, admin: bool
    ) -> None:
        service = ControlService(
            self._runtime,
            state,
            self._callers,
            adapters=adapters,
            admin=admin,
            ending=self._stopping,
            now=self._now,
            timeout_s=self._settings.runtime_timeout_s,
            probe_timeout_s=self._settings.probe_timeout_s,
        )
        openengine_pb2_grpc.add_ControlServicer_to_server(service, listener.server)

    def _reflect(self, listener: Listener, *services: str) -> None:
        if not self._settings.reflection:
            return
        from grpc_reflection.v1alpha import reflection

        reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), listener.server)

    async def _observe(self, state: EngineState) -> None:
        """For ever: notice what changes without an order, such as a lost rank."""
        while True:
            await self._until_something_may_have_changed()
            await state.refresh()
            if state.journal.broken:
                await state.journal.try_again()
                state.changed()

    async def _until_something_may_have_changed(self) -> None:
        interval_s = self._settings.observe_interval_s
        if not isinstance(self._runtime, WatchedRuntime):
            await asyncio.sleep(interval_s)
            return
        try:
            async with asyncio.timeout(interval_s):
                await self._runtime.moved()
        except TimeoutError:
            return
        except Exception:
            log.exception("the runtime cannot say when it has changed")
            await asyncio.sleep(interval_s)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, end held requests, give running ones `grace_s`, then close all.

        An order that still runs is left open in the store: the next start ends it truthfully.
        Closes the runtime too.
        """
        served = self._served
        if served is None or self._stopped.is_set():
            return
        try:
            await served.board.stop()
            served.state.gate.stop("the engine is stopping")
            self._stopping.set()
            await asyncio.gather(*(listener.stop(grace_s) for listener in served.listeners))
            await served.desk.stop()
            for task in served.background:
                task.cancel()
            await asyncio.wait(served.background)
            await served.state.journal.close()
        finally:
            await self._runtime.close()
            self._stopped.set()

    async def wait(self) -> None:
        """Until `stop` has been called and is done."""
        await self._stopped.wait()


class _Served:
    def __init__(
        self,
        inference: Listener,
        admin: Listener,
        vllm: Listener | None,
        state: EngineState,
        desk: OrderDesk,
        board: HealthBoard,
        background: tuple[asyncio.Task[None], ...],
    ) -> None:
        self.inference = inference
        self.admin = admin
        self.vllm = vllm
        self.listeners = (inference, admin) if vllm is None else (inference, admin, vllm)
        self.state = state
        self.desk = desk
        self.board = board
        self.background = background
