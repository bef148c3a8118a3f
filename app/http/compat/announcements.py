"""What trainers have said of how weights will travel, kept until they begin to send them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from app.domain.kinds import Component
from app.domain.operation import Actor
from app.domain.weight_sessions import Transfer
from app.domain.weight_sources import DiskWeights

_MOST = 1024


@dataclass(frozen=True, slots=True)
class Announced:
    """What a trainer has said of an engine: `transfer` by init, None where it says nothing (from
    disk). `component`: an update has been started, and begins with its first piece, under the pause
    of `pause_epoch`; `checkpoint`: that piece, where the engine takes no other and gets it with the
    finish. `shut`: the transfer was shut down since. `selector`: of which model, where SGLang's
    clients have begun an update."""

    transfer: Transfer | None = None
    component: Component | None = None
    pause_epoch: int | None = None
    checkpoint: DiskWeights | None = None
    check_finite: bool = False
    shut: bool = False
    selector: str | None = None


class Announcements:
    """Of each caller about each engine, in this process: the latest ones, so many at most."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, Actor], Announced] = OrderedDict()
        self._joining: dict[tuple[str, Actor, Transfer], asyncio.Task[bool]] = {}

    def of(self, engine_id: str, actor: Actor) -> Announced | None:
        return self._kept.get((engine_id, actor))

    def keep(self, engine_id: str, actor: Actor, announced: Announced) -> None:
        self._kept[engine_id, actor] = announced
        self._kept.move_to_end((engine_id, actor))
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)

    async def joined(
        self,
        engine_id: str,
        actor: Actor,
        transfer: Transfer,
        join: Callable[[], Coroutine[Any, Any, bool]],
    ) -> bool:
        """What `join` gives; while it is under way, a call once more waits for the same one. It
        goes on when nobody waits for it."""
        key = (engine_id, actor, transfer)
        task = self._joining.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(join())
            self._joining[key] = task
            task.add_done_callback(lambda done: self._over(key, done))
        return await asyncio.shield(task)

    def _over(self, key: tuple[str, Actor, Transfer], task: asyncio.Task[bool]) -> None:
        del self._joining[key]
        if not task.cancelled():
            task.exception()  # whoever waited may have left
