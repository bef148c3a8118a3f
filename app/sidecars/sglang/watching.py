"""Looking at an SGLang engine.

What the front end answers by itself says nothing of the scheduler behind it, which may be stuck for
good while the server calls itself ready. `/health` would tell, by generating a token: it hangs
under a pause, and the server remembers the failure. So the scheduler is asked what it is, and by
how far its own account of itself lies back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.domain.facts import LoraFact, WeightsFact
from app.domain.kinds import PauseMode
from app.enginekit.runtime import Holding, Observation
from app.sidecars.answers import Unreadable
from app.sidecars.faults import told
from app.sidecars.http import CallError, NoAnswer, NotSent
from app.sidecars.sglang.answers import loads, model_info
from app.sidecars.sglang.belief import Hold
from app.sidecars.sglang.discovery import identity_of, server_info
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.sglang.reconfiguring import ROLES
from app.sidecars.watching import Orders, Watch, ranks_if, weights_if

SILENT = "the engine's scheduler does not answer"
_ASK_S = 2.0
_FRESH_S = 3.0


class SglangWatch(Watch):
    """`stale_s`: a scheduler that has told nothing of itself for so long, and does not answer, is
    stuck. A pause that holds it is no reason: then it does answer."""

    def __init__(self, engine: SglangEngine, look_s: float, stale_s: float) -> None:
        super().__init__(look_s)
        self._engine = engine
        self._stale_s = stale_s
        self._loras: tuple[LoraFact, ...] = ()
        self._asked_at = float("-inf")
        self._was_gone = False
        self._silent_since: float | None = None
        self._held: tuple[int, float] | None = None  # orders so far, and the scheduler's account

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(one.name for one in self._loras)

    async def lost(self) -> str | None:
        http = self._engine.http
        try:
            model_info(await http.read("/model_info"))
        except NotSent as error:
            self._was_gone = True
            return error.message
        except CallError as error:
            return error.message
        except Unreadable as error:
            return str(error)
        now = asyncio.get_running_loop().time()
        due = now >= self._asked_at + self._look_s or self._silent_since is not None
        if self._was_gone or (due and not self.busy and not self._engine.occupied):
            return await self._ask(now)
        return None

    async def _ask(self, now: float) -> str | None:
        """Of the scheduler. It may be in the midst of a long step, which its account then shows."""
        http = self._engine.http
        try:
            info = await server_info(http, _ASK_S)
            if identity_of(info) != self._engine.found.identity:
                self.restarted.set()
                return "the engine was started anew"
        except NoAnswer:
            if self._silent_since is None:
                self._silent_since = now
            silent_s = now - self._silent_since
            age_s = await self._age_s()
            # Held by a pause it gives no account, and answers all the same.
            told_lately = age_s is not None and age_s < self._stale_s and not self._engine.held
            return None if told_lately or silent_s < self._stale_s / 2 else SILENT
        except CallError as error:
            return error.message
        except Unreadable as error:
            return str(error)
        self._asked_at, self._silent_since, self._was_gone = now, None, False
        return None

    async def _age_s(self) -> float | None:
        try:
            return loads(await self._engine.http.read("/v1/loads")).age_s
        except (CallError, Unreadable):
            return None

    async def glance(self) -> None:
        adapters = await self._engine.adapters()
        self._loras = tuple(
            LoraFact(name, self._engine.number_of(name), root) for name, root in adapters.items()
        )

    async def look(self, orders: Callable[[], Orders]) -> bool:
        engine, before = self._engine, orders()
        if self._silent_since is not None:
            return False
        paused = await self._paused(before.begun)
        if orders() != before:
            return False  # what was read may be of before or of after
        if paused is not None and paused != (engine.belief.paused is not None):
            belief = engine.belief
            opened = belief.open
            closed = belief.paused_as(PauseMode.KEEP, Hold.IN_PLACE)
            engine.believe(closed if paused else opened)
        await engine.read_model()
        return True

    async def _paused(self, begun: int) -> bool | None:
        """None: what is believed may stand. The server is ready when it is neither paused nor has
        failed a probe, so that it may be open all the same when it is not. `begun`: orders."""
        engine = self._engine
        if await engine.ready():
            self._held = None
            return False
        if engine.belief.paused is None:
            self._held = None
            return not await self._generates()
        with told():
            found = loads(await engine.http.read("/v1/loads"))
        if not engine.held:
            # Its front end alone holds requests back: what runs has come past a resume. An account
            # that is old says nothing of now.
            return False if found.in_flight and found.age_s < _FRESH_S else None
        at = max(rank.at for rank in found.ranks)
        if self._held is None or self._held[0] != begun:
            self._held = begun, at  # an order of ours may have moved it
        if at <= self._held[1]:
            return None
        # It moves. Whether it is open, a token tells; else its front end alone holds it now.
        self._held = None
        if await self._generates():
            return False
        engine.believe(engine.belief.paused_as(engine.belief.paused, Hold.ABORT))
        return None

    async def _generates(self) -> bool:
        return await self._engine.answers(_ASK_S)

    def seen(self, lost: str | None) -> Observation:
        engine = self._engine
        belief = engine.belief
        state = weights_if(lost, belief.weights)
        return Observation(
            weights=WeightsFact(version=engine.version or None, state=state),
            released=belief.released,
            role=ROLES.get(engine.role, ROLES["null"]),
            loras=self._loras,
            ranks=ranks_if(lost, engine.found.world_size),
            group=self._group,
            holding=Holding(belief.paused),
        )
