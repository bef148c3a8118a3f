"""Another shape of serving: role, parallelism, limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from app.domain.commands import ReconfigureServing
from app.domain.kinds import CacheKind, EngineRole, ReconfigurableField
from app.domain.operation import JsonValue
from app.enginekit.errands import Ending, Errand
from app.enginekit.pausing import PAUSE_NOT_LIFTED, OwnPause
from app.enginekit.records import REVISION, Counters
from app.enginekit.runtime import EngineDescription, Observation

Shape = Mapping[ReconfigurableField, EngineRole | int | None]


async def reconfigure(errand: Errand) -> Ending:
    """Nothing runs meanwhile. A target that is reached already changes nothing; a failure leaves
    the old shape, and admission as it was."""
    command = cast("ReconfigureServing", errand.command)
    state = errand.state
    targets = command.targets()
    before = shape_of(errand.describe(), state.observation.role)
    if all(before[name] == wanted for name, wanted in targets.items()):
        return _ending(before, changed=False)
    own = OwnPause()
    await own.close(errand, command.drain)
    async with own.lifted_on_failure(errand):
        conclusion = await errand.over_ranks()
    lifted = await own.lift(errand)
    role = command.role or state.observation.role
    # Ranks that were started for the new shape have nothing of what the earlier ones computed.
    clean = any(
        cache.kind is CacheKind.PREFIX and not cache.blocks_in_use for cache in conclusion.flushed
    )

    def settle(_: Counters, seen: Observation | None) -> None:
        state.reconfigured(role, seen, clean=clean)
        if lifted:
            state.resumed(seen)

    after = shape_of(errand.describe(), role)
    ending = _ending(after, changed=True)
    return Ending(
        result=ending.result,
        change=REVISION,
        settle=settle,
        shows=lambda seen: seen.role is role,
        proved=all(after[name] == wanted for name, wanted in targets.items()),
        warnings=(PAUSE_NOT_LIFTED,) if own.holds and not lifted else (),
    )


def shape_of(engine: EngineDescription, role: EngineRole) -> Shape:
    return {
        ReconfigurableField.ROLE: role,
        ReconfigurableField.TENSOR_PARALLEL_SIZE: engine.tensor_parallel_size,
        ReconfigurableField.DATA_PARALLEL_SIZE: engine.data_parallel_size,
        ReconfigurableField.MAX_RUNNING_REQUESTS: engine.max_running_requests,
        ReconfigurableField.MAX_BATCHED_TOKENS: engine.max_batched_tokens,
    }


def _ending(shape: Shape, *, changed: bool) -> Ending:
    # A number that the engine does not know of itself is 0, as in the message.
    told: dict[str, JsonValue] = {name.value: shape[name] or 0 for name in ReconfigurableField}
    return Ending(result=lambda _: {"changed": changed, **told})
