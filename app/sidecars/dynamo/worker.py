"""One life of a worker: its system server, what was found out about it, and what is believed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from app.domain.kinds import PauseMode
from app.enginekit.runtime import RuntimeFault
from app.sidecars.allowed import Allowed
from app.sidecars.answers import Answer, Unreadable, field_of
from app.sidecars.believing import Believing
from app.sidecars.dynamo.answers import (
    Metrics,
    carried_out,
    failure_of,
    loras_of,
    metrics_of,
)
from app.sidecars.dynamo.belief import SAME_START_S, Belief
from app.sidecars.dynamo.discovery import Discovered
from app.sidecars.dynamo.workers import Route
from app.sidecars.faults import fault_of, remaining_s, told
from app.sidecars.http import EngineHttp, NoAnswer, NotSent, Refused
from app.sidecars.notes import Notes

T = TypeVar("T")

ROUTE_NOT_THERE = "ROUTE_NOT_THERE"
_LONGEST_VERSION = 1024
_LET_GO_S = 1.0


class NothingSent(RuntimeFault):
    """The worker was not given the order, or has no callback for it: nothing was done."""

    @classmethod
    def of(cls, fault: RuntimeFault) -> NothingSent:
        return cls(fault.reason, fault.message, retryable=fault.retryable, code=fault.code)


class DynamoWorker(Believing[Belief]):
    """Lives on one event loop."""

    def __init__(
        self, http: EngineHttp, found: Discovered, allowed: Allowed, notes: Notes, belief: Belief
    ) -> None:
        super().__init__(notes, found.identity, belief)
        self.http = http
        self.found = found
        self.allowed = allowed
        self._started = math.inf  # on the event loop's clock, as reckoned first
        self._going: asyncio.Task[Any] | None = None

    @classmethod
    async def attach(
        cls, http: EngineHttp, found: Discovered, allowed: Allowed, notes: Notes
    ) -> DynamoWorker:
        """Take over from whoever had the worker before. One whose pause cannot be read is taken for
        open. Raises RuntimeFault, OSError; ValueError: the notes are damaged."""
        belief = Belief.of(notes.read(), found.identity) or Belief()
        worker = cls(http, found, allowed, notes, belief)
        notes.write(belief.document(found.identity))
        await worker.metrics()
        worker.saw(await worker.paused())
        await worker.read_version()
        return worker

    # ---- reading ----

    async def metrics(self) -> Metrics:
        """Of this life. Raises RuntimeFault."""
        with told():
            metrics = metrics_of(await self.http.read("/metrics"))
        if self.is_another(metrics):
            raise RuntimeFault("ENGINE_RESTARTED", "the worker was started anew")
        return metrics

    def is_another(self, metrics: Metrics) -> bool:
        """Whether a worker answers that was started later, or under another id. Also one that does
        not tell: then it is another server. Answers may cross, and arrive late."""
        uptime_s = metrics.uptime_s
        if uptime_s is None or metrics.worker_id != self.found.identity.worker_id:
            return True
        started = asyncio.get_running_loop().time() - uptime_s
        self._started = min(self._started, started)
        return started > self._started + SAME_START_S

    async def _read(self, path: str) -> Answer:
        """A callback that changes nothing. Raises RuntimeFault."""
        with told():
            answer = await self.http.read(f"/engine/{path}")
            failure = failure_of(answer)
        if failure is not None:
            raise RuntimeFault("ENGINE_REFUSED", failure)
        return answer

    async def paused(self) -> bool | None:
        """None: this kind does not tell. Raises RuntimeFault."""
        if self.found.routes.paused is None or not self.found.tells_pause:
            return None
        path, name = self.found.routes.paused
        answer = await self._read(path)
        with told():
            return bool(field_of(answer, name, bool))

    def saw(self, paused: bool | None) -> None:
        """What somebody else did is believed from then on: a pause of theirs in the mode that
        nothing must be concluded from. Raises RuntimeFault."""
        if paused is not None and paused != (self.belief.paused is not None):
            self.believe(replace(self.belief, paused=PauseMode.KEEP if paused else None))

    async def read_version(self) -> str | None:
        """Raises RuntimeFault."""
        if self.found.routes.version is None or not self.found.tells_version:
            return self.belief.version
        path, name = self.found.routes.version
        answer = await self._read(path)
        with told():
            found = answer.json().get(name)
            if found is not None and not isinstance(found, str):
                raise Unreadable("the worker's version of its weights is no text")
            if found is not None and len(found) > _LONGEST_VERSION:
                raise Unreadable("the worker's version of its weights is too long")
        self.believe(replace(self.belief, version=found or None))
        return self.belief.version

    async def is_alive(self) -> bool:
        """Whether the engine behind the worker answers its probe. Raises RuntimeFault: the worker
        cannot be asked."""
        alive = self.found.routes.alive
        if alive is None:
            return True
        with told():
            answer = await self.http.get(f"/engine/{alive}")
            if answer.status == 404:  # kept from everybody by whoever started the worker
                return True
            return answer.status == 200 and failure_of(answer) is None

    async def loras(self) -> dict[str, int]:
        """Names and the worker's numbers. Raises RuntimeFault."""
        if not self.found.adapters:
            return {}
        with told():
            return loras_of(await self.http.read("/v1/loras"))

    # ---- orders ----

    async def order(
        self, route: Route, body: Mapping[str, Any], *, within_s: float | None = None
    ) -> Mapping[str, Any]:
        """An order is for the life of the worker that it was given to. A callback goes on to its
        end whether anybody waits for it or not. Raises RuntimeFault; NothingSent, among others for
        ROUTE_NOT_THERE."""
        try:
            await self.metrics()
        except RuntimeFault as fault:
            raise NothingSent.of(fault) from fault
        with told():
            try:
                answer = await self.http.post(f"/engine/{route.path}", body=body, within_s=within_s)
            except NotSent as error:
                raise NothingSent.of(fault_of(error)) from error
            except Refused as error:
                if error.status != 404:
                    raise
                text = f"the worker has no route {route.path}, or keeps it from everybody"
                raise NothingSent(ROUTE_NOT_THERE, text, code="UNIMPLEMENTED") from error
            failure = failure_of(answer)
            if failure is None:
                return carried_out(answer, route.says)
        raise RuntimeFault("ENGINE_REFUSED", failure)

    def longest_s(self, deadline_at: float) -> float:
        """That it may be at an order which changes memory or weights, and that was given up."""
        return remaining_s(deadline_at) + self.http.patience.control_s

    def may_move(self) -> None:
        """Raises RuntimeFault while the worker is at a call that nobody waits for any more."""
        if self._going is not None and not self._going.done():
            raise RuntimeFault(
                "WORKER_BUSY", "the worker is still at an earlier order", retryable=True
            )

    async def through(self, work: Coroutine[Any, Any, T]) -> T:
        """Calls that are not broken off with whoever waits for them, since the worker goes on with
        them: what follows from them is seen to when they end. One at a time."""
        going = self._going = asyncio.create_task(work)
        going.add_done_callback(_look_at)
        return await asyncio.shield(going)

    async def is_over(self, within_s: float) -> bool:
        if self._going is not None:
            await asyncio.wait({self._going}, timeout=within_s)
        return self._going is None or self._going.done()

    async def ended(self, within_s: float) -> None:
        """Raises RuntimeFault: the last of them has not, or nobody knows how."""
        if not await self.is_over(within_s):
            self.may_move()
        fault = None if self._going is None else self._going.exception()
        if fault is not None and isinstance(fault.__cause__, NoAnswer):
            raise RuntimeFault("NOT_UNDONE", "whether the worker has done it is not known")

    async def let_go(self) -> None:
        """What it would still see to is broken off as well, where the worker does not answer."""
        for _ in range(2):
            if self._going is not None and not self._going.done():
                self._going.cancel()
                await asyncio.wait({self._going}, timeout=_LET_GO_S)

    async def pause(self, mode: PauseMode, *, within_s: float | None = None) -> None:
        """Raises RuntimeFault."""
        routes = self.found.routes
        assert routes.pause is not None  # nothing else is offered
        body = {"mode": routes.modes[mode], **routes.pause_options}
        said = await self.order(routes.pause, body, within_s=within_s)
        if said.get("mode", body["mode"]) != body["mode"]:
            raise RuntimeFault("NOT_CARRIED_OUT", "the worker says that it paused in another mode")
        if await self.paused() is False:
            raise RuntimeFault("PAUSE_NOT_SEEN", "somebody else has resumed the engine meanwhile")

    async def freeze(self) -> None:
        """Closed again, whatever has slipped in meanwhile. Raises RuntimeFault."""
        await self.pause(PauseMode.KEEP)

    async def resume(self) -> None:
        """Raises RuntimeFault."""
        resume = self.found.routes.resume
        assert resume is not None  # nothing else is offered
        await self.order(resume, {})
        if await self.paused():
            raise RuntimeFault("RESUME_NOT_SEEN", "somebody else has paused the engine meanwhile")


def _look_at(going: asyncio.Task[Any]) -> None:
    """Whoever waited was told."""
    if not going.cancelled():
        going.exception()
