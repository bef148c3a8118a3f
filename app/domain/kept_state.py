"""What the gateway keeps of an engine that keeps nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.domain.operation import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """One version of it. `number` counts the versions: the next one is written only in the place of
    the one before, so that of two writers one is told that it came too late. The three counters
    never go back. `operation_id`: the order that is being carried out; None: none is. `abandoned`,
    when read: that operation has ended, and whoever wrote its id has not come back to say how it
    left the engine. `document`: the rest, in the words of whoever wrote it.
    """

    number: int
    revision: int
    pause_epoch: int
    release_epoch: int
    operation_id: str | None = None
    abandoned: bool = False
    document: JsonObject = field(default_factory=dict)
