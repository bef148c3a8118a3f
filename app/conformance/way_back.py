"""Back to the state that the engine was found in, as far as it lets that be done."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from app.conformance.case import NotHeld
from app.conformance.client import brief, completed_of
from app.conformance.orders import named
from app.conformance.record import Refusal
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lora_pb2

if TYPE_CHECKING:
    from app.conformance.trial import Trial


class Unsettled(Exception):
    """The engine is not as it was found, and cannot be brought back."""


class SomebodyElse(Unsettled):
    """What is to be taken back is not the run's own, and no restart of its may do that either."""


class WayBack:
    """Of one run: what it has made and nothing else is taken back."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    async def take(self) -> None:
        """To open admission with nothing running. Raises NotHeld or Unsettled."""
        trial = self._trial
        if trial.broken and trial.options.hook is not None:
            await trial.restart()
        await self._until_quiet()
        # In this order: nothing can be resumed while something is released or weights are missing.
        await self._unload_own_adapters()
        await self._restore_own_release()
        await self._bring_weights_back()
        await self._bring_shape_back()
        await self._lift_own_pause()
        profile = await trial.client.profile()
        if profile.state.admission != pb.ADMISSION_STATE_OPEN or profile.state.released:
            raise Unsettled(f"the engine's state is {brief(profile.state)}")
        trial.know(profile)

    async def _until_quiet(self) -> None:
        """Until nothing of this run is open; what can be cancelled is."""
        client, loop = self._trial.client, asyncio.get_running_loop()
        until = loop.time() + self._trial.patience_s
        asked: set[str] = set()
        while True:
            profile = await client.profile()
            own = [o for o in profile.state.open_operations if self._own(o.idempotency_key)]
            if not own:
                return
            for operation in own:
                if operation.operation_id not in asked:
                    asked.add(operation.operation_id)
                    await client.ask(
                        pb.CancelAdminOperationRequest(operation_id=operation.operation_id)
                    )
            if loop.time() > until:
                raise NotHeld("operations to end", brief(profile.state))
            await asyncio.sleep(0.02)

    async def _unload_own_adapters(self) -> None:
        """The requests that used them have been hung up on, and are about to end."""
        trial, loop = self._trial, asyncio.get_running_loop()
        until = loop.time() + trial.patience_s
        profile = await trial.client.profile()
        for adapter in profile.state.loras:
            if not self._own(adapter.lora_name):
                continue
            request = lora_pb2.UnloadLoraRequest(lora_name=adapter.lora_name)
            while isinstance(
                answer := await trial.client.of_control("UnloadLora", request), Refusal
            ):
                if loop.time() > until:
                    raise NotHeld("an adapter to be unloaded", str(answer))
                await asyncio.sleep(0.05)

    async def _restore_own_release(self) -> None:
        trial = self._trial
        profile = await trial.client.profile()
        if profile.state.released and not trial.start.state.released:
            restore = trial.orders.restore(
                profile.release_epoch, resources=list(profile.state.released)
            )
            completed_of(await trial.client.told(restore))

    async def _bring_weights_back(self) -> None:
        """Where a case has loaded others than those it was given, or has discarded them."""
        trial = self._trial
        state = (await trial.client.profile()).state.weights.state
        lost = (pb.WEIGHTS_STATE_MISSING, pb.WEIGHTS_STATE_INCONSISTENT)
        if trial.options.weights is None or not (trial.altered or state in lost):
            return
        held = (await trial.client.profile()).state.admission == pb.ADMISSION_STATE_PAUSED
        fields: dict[str, Any] = {"under_pause": pb.UnderPause()} if held else {}
        completed_of(await trial.client.told(trial.orders.update(trial.options.weights, **fields)))
        trial.altered = False

    async def _bring_shape_back(self) -> None:
        """Role and number of ranks; limits are set back by the case that sets them."""
        trial = self._trial
        now = await trial.client.profile()
        targets: dict[str, Any] = {}
        if now.state.role != trial.start.state.role:
            targets["role"] = trial.start.state.role
        if now.world_size != trial.start.world_size and trial.tensor_parallel_size:
            targets["tensor_parallel_size"] = trial.tensor_parallel_size
        if targets:
            completed_of(await trial.client.told(trial.orders.reconfigure(**targets)))

    async def _lift_own_pause(self) -> None:
        trial = self._trial
        profile = await trial.client.profile()
        pause = profile.state.pause
        if profile.state.admission != pb.ADMISSION_STATE_PAUSED:
            return
        if profile.state.HasField("pause") and not self._own_pause(pause):
            raise SomebodyElse("somebody else has paused the engine meanwhile; that pause stays")
        request = trial.orders.resume(pause.epoch or profile.pause_epoch)
        completed_of(await trial.client.told(request))

    def _own(self, key: str) -> bool:
        return key.startswith(self._trial.prefix)

    def _own_pause(self, pause: pb.PauseStatus) -> bool:
        ids = {event.operation_id for told in self._trial.record.told for event in told.events}
        return self._own(pause.idempotency_key) or pause.operation_id in ids


def why_not_begun(answer: pb.AdminProfile) -> str | None:
    """What forbids a run against an engine in that state."""
    if answer.state.admission != pb.ADMISSION_STATE_OPEN:
        state = named(pb.AdmissionState, answer.state.admission)
        return f"admission is {state}: the suite lifts no pause but its own; resume first"
    if answer.state.open_operations:
        return "an operation is running on this engine; wait for its end"
    if answer.state.released:
        return "resources are released; restore them first"
    return None
