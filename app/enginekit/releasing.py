"""Memory given back, and taken again."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from app.domain.commands import ReleaseResources, RestoreResources
from app.domain.kinds import ResourceKind
from app.domain.operation import JsonValue
from app.enginekit.errands import Ending, Errand
from app.enginekit.pausing import OwnPause
from app.enginekit.records import REVISION, Change
from app.enginekit.runtime import Conclusion

RELEASED = Change(revision=True, release_epoch=True)


async def release(errand: Errand) -> Ending:
    """Admission is closed by a pause of its own when it is open, and stays closed: whoever serves
    again restores, then resumes that pause."""
    command = cast("ReleaseResources", errand.command)
    state = errand.state
    before = state.released
    todo = tuple(kind for kind in command.resources if state.would_release(kind, command.content))
    if not todo:
        return _ending(before, Conclusion(), OwnPause(), changed=False)
    own = OwnPause()
    await own.close(errand, command.drain)
    async with own.lifted_on_failure(errand):
        conclusion = await errand.over_ranks(replace(command, resources=todo))
    after = before | set(todo)
    ending = _ending(after, conclusion, own, changed=True)
    return replace(
        ending,
        change=RELEASED,
        settle=lambda _, seen: state.took_release(todo, command.content, seen),
        shows=lambda seen: seen.released == after,
    )


async def restore(errand: Errand) -> Ending:
    command = cast("RestoreResources", errand.command)
    state = errand.state
    before = state.released
    todo = tuple(kind for kind in command.resources if kind in before)
    if not todo:
        return _ending(before, Conclusion(), None, changed=False)
    conclusion = await errand.over_ranks(replace(command, resources=todo))
    after = before - set(todo)
    ending = _ending(after, conclusion, None, changed=True)
    return replace(
        ending,
        change=REVISION,
        settle=lambda _, seen: state.took_restore(todo, seen),
        shows=lambda seen: seen.released == after,
    )


def _ending(
    released: frozenset[ResourceKind],
    conclusion: Conclusion,
    own: OwnPause | None,
    *,
    changed: bool,
) -> Ending:
    names: list[JsonValue] = [kind.value for kind in sorted(released)]
    memory: list[JsonValue] = [
        {
            "rank": held.rank,
            "resource": held.resource.value,
            "bytes_before": held.bytes_before,
            "bytes_after": held.bytes_after,
        }
        for held in conclusion.memory
    ]
    ended: dict[str, JsonValue] = {}
    if own is not None:
        ended = {"requests_finished": own.finished, "requests_aborted": own.aborted}
    return Ending(
        result=lambda counters: {
            "changed": changed,
            "release_epoch": counters.release_epoch,
            "released": names,
            "memory": memory,
            **ended,
        }
    )
