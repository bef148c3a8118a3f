"""What trainers have said of how weights will travel, kept until they begin to send them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from app.domain.kinds import Component
from app.domain.operation import Actor
from app.domain.weight_sessions import Transfer

_MOST = 1024


@dataclass(frozen=True, slots=True)
class Announced:
    """What a trainer has said of an engine: `transfer` by init, None where it says nothing (from
    disk). `component`: an update has been started, and begins with its first piece. `shut`: the
    transfer was shut down since."""

    transfer: Transfer | None = None
    component: Component | None = None
    shut: bool = False


class Announcements:
    """Of each caller about each engine, in this process: the latest ones, so many at most."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, Actor], Announced] = OrderedDict()

    def of(self, engine_id: str, actor: Actor) -> Announced | None:
        return self._kept.get((engine_id, actor))

    def keep(self, engine_id: str, actor: Actor, announced: Announced) -> None:
        self._kept[engine_id, actor] = announced
        self._kept.move_to_end((engine_id, actor))
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)
