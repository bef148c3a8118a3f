"""From what a source lists and what is registered to what has to be done. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from app.domain.engine import Registration
from app.operations.registering import EngineChange, EngineDraft

LABEL = "chadburn/discovery"
"""On every engine that a source brought: its value is the source's name. Whoever takes the label
off takes the engine over; whoever puts it on hands an engine to the source."""


@dataclass(frozen=True, slots=True)
class Register:
    draft: EngineDraft


@dataclass(frozen=True, slots=True)
class Change:
    engine_id: str
    generation: int
    change: EngineChange


@dataclass(frozen=True, slots=True)
class Remove:
    engine_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class LeaveAlone:
    """Listed, and not for this source to touch."""

    engine_id: str
    why: str


Step = Register | Change | Remove | LeaveAlone


def marked(draft: EngineDraft, source: str) -> EngineDraft:
    """As the source registers it."""
    return replace(draft, labels={**draft.labels, LABEL: source})


def planned(
    source: str, listed: Mapping[str, EngineDraft], registered: Iterable[Registration]
) -> tuple[Step, ...]:
    """What brings the register to what is listed; removals first. Nothing that is not the source's
    own is changed or removed."""
    steps: list[Step] = []
    known = {one.id: one for one in registered}
    for one in known.values():
        if one.labels.get(LABEL) == source and one.id not in listed:
            steps.append(Remove(one.id, one.generation))
    for engine_id in sorted(listed):
        draft = marked(listed[engine_id], source)
        there = known.get(engine_id)
        step = Register(draft) if there is None else _beside(there, draft, source)
        if step is not None:
            steps.append(step)
    return tuple(steps)


def _beside(there: Registration, draft: EngineDraft, source: str) -> Step | None:
    owner = there.labels.get(LABEL)
    if owner != source:
        whose = "by hand" if owner is None else f"by {owner}"
        return LeaveAlone(there.id, f"is registered {whose}")
    if there.dialect is not draft.dialect:
        return LeaveAlone(there.id, "is registered with another dialect, which never changes")
    change = EngineChange(
        members=None if there.members == draft.members else draft.members,
        tls=None if there.tls == draft.tls else draft.tls,
        labels=None if dict(there.labels) == dict(draft.labels) else draft.labels,
    )
    return None if change == EngineChange() else Change(there.id, there.generation, change)
