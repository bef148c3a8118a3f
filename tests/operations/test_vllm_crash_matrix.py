"""The gateway dies at every call that it makes to vLLM, before the call has done anything and
after, and another one goes on: what it then says of the order and the engine is true, and vLLM
lives. And the engine dies at every call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.domain.commands import (
    Command,
    LoadLora,
    Pause,
    ReleaseResources,
    RestoreResources,
    Resume,
    SetWeightVersion,
    UnloadLora,
)
from app.domain.kinds import (
    Admission,
    ContentPolicy,
    DrainRule,
    OperationState,
    PauseMode,
    ResourceKind,
    WeightsState,
)
from app.domain.weight_sessions import CommitSession
from tests.doubles.vllm_control import VllmControl
from tests.operations.gateway import until
from tests.operations.test_vllm_weights import begun, chunk, go_on, session
from tests.operations.vllm import VllmGateway, vllm_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.long]

S = OperationState
BOTH = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE)
KEEP = Pause(mode=PauseMode.KEEP)
RELEASE = ReleaseResources(resources=BOTH, content=ContentPolicy.PRESERVE, drain=DrainRule.ABORT)
LOAD = LoadLora(name="a", path="/a")


@dataclass(frozen=True)
class Case:
    """`first`: orders before it. `done`: how the engine is when it has been carried out."""

    command: Command
    rpcs: tuple[str, ...]
    done: Callable[[VllmControl], bool]
    first: tuple[Command, ...] = ()


CASES = {
    "abort": Case(Pause(mode=PauseMode.ABORT), ("PauseGeneration",), lambda e: e.paused),
    "keep": Case(KEEP, ("PauseGeneration",), lambda e: e.paused),
    "drain": Case(Pause(mode=PauseMode.DRAIN), ("PauseGeneration",), lambda e: e.paused),
    "resume": Case(Resume(pause_epoch=1), ("ResumeGeneration",), lambda e: not e.paused, (KEEP,)),
    "release": Case(RELEASE, ("Sleep",), lambda e: len(e.asleep) == 2),
    "restore": Case(
        RestoreResources(resources=BOTH, release_epoch=1),
        ("WakeUp", "PauseGeneration"),
        lambda e: not e.asleep and e.paused,
        (RELEASE,),
    ),
    "restore-one": Case(
        RestoreResources(resources=(ResourceKind.WEIGHTS,), release_epoch=1),
        ("WakeUp",),
        lambda e: e.asleep == {"kv_cache"} and e.paused,
        (RELEASE,),
    ),
    "version": Case(
        SetWeightVersion(weight_version="v8"),
        ("UpdateWeightVersion",),
        lambda e: e.weight_version == "v8",
    ),
    "load": Case(LOAD, ("LoadLora",), lambda e: set(e.loras) == {"a"}),
    "unload": Case(UnloadLora(name="a"), ("UnloadLora",), lambda e: not e.loras, (LOAD,)),
    "update": Case(
        session(),
        (
            "InitWeightTransferEngine",
            "PauseGeneration",
            "StartWeightUpdate",
            "UpdateWeights",
            "FinishWeightUpdate",
            "ResumeGeneration",
        ),
        lambda e: e.weights == "new" and e.weight_version == "v7" and not e.paused,
    ),
}
POINTS = [
    (name, rpc, when)
    for name, case in CASES.items()
    for rpc in case.rpcs
    for when in ("before", "after")
]


@pytest.mark.parametrize(("name", "rpc", "when"), POINTS)
async def test_at_every_call(tmp_path: Path, name: str, rpc: str, when: str) -> None:
    case = CASES[name]
    async with vllm_gateway(tmp_path) as gateway:
        engine = gateway.engine
        for command in case.first:
            assert (await gateway.carry_out(command)).state is S.SUCCEEDED
        made = len(engine.named(rpc))
        answer = asyncio.Event()
        (engine.hangs if when == "before" else engine.stalls)[rpc] = answer
        order = await gateway.give(case.command)
        if name == "update":
            await begun(gateway, order)
            await go_on(gateway, chunk())
            await go_on(gateway, CommitSession(1))
        await until(lambda: len(engine.named(rpc)) > made)
        if when == "after":
            await asyncio.wait_for(_carried_out(gateway, case, rpc), 5)
        await gateway.stop()
        engine.hangs.clear()
        engine.stalls.clear()
        answer.set()
        await gateway.start()
        ended = await gateway.end_of(order)
        facts = await gateway.facts()
        # What is said is so.
        if ended.state is S.SUCCEEDED:
            assert case.done(engine), (ended, engine.orders)
        assert facts.admission is (Admission.PAUSED if engine.paused else Admission.OPEN)
        assert {kind.value for kind in facts.released} >= engine.asleep
        if engine.weights == "half":
            assert facts.weights.state is WeightsState.INCONSISTENT
        if facts.weights.state is not WeightsState.VALID or engine.asleep:
            assert engine.paused
        assert facts.weights.version == engine.weight_version
        # Nothing was done twice, and the engine lives.
        if when == "after" and rpc != "PauseGeneration":
            assert len(engine.named(rpc)) == made + 1, engine.orders
        assert not engine.dead
        assert engine.generate() in ("tokens", "hangs")
        assert not engine.dead
        assert facts.open_operations == ()


@pytest.mark.parametrize("left", [False, True], ids=["comes-back", "front-end-stays"])
@pytest.mark.parametrize(("name", "rpc"), sorted({(name, rpc) for name, rpc, _ in POINTS}))
async def test_the_engine_dies_at_every_call(
    tmp_path: Path, name: str, rpc: str, left: bool
) -> None:
    case = CASES[name]
    async with vllm_gateway(tmp_path) as gateway:
        engine = gateway.engine
        for command in case.first:
            assert (await gateway.carry_out(command)).state is S.SUCCEEDED
        made = len(engine.named(rpc))
        answer = engine.hangs[rpc] = asyncio.Event()
        order = await gateway.give(case.command)
        if name == "update":
            await begun(gateway, order)
            await go_on(gateway, chunk())
            await go_on(gateway, CommitSession(1))
        await until(lambda: len(engine.named(rpc)) > made)
        engine.hangs.clear()
        if left:
            # The call gets its answer, INTERNAL, as every other one from now on.
            engine.dead = True
            answer.set()
        else:
            await gateway.controls[0].restart()
        ended = await gateway.end_of(order)
        assert ended.state is S.FAILED, ended
        assert ended.error is not None
        assert ended.error.reason in ("ENGINE_RESTARTED", "ENGINE_DEAD"), ended.error
        if left:
            await gateway.controls[0].restart()
        facts = await gateway.facts()
        assert (facts.admission, facts.released) == (Admission.OPEN, frozenset())
        # Whether a start that was lost went to the new process is not known.
        spoilt = rpc == "StartWeightUpdate" and not left
        whole = WeightsState.INCONSISTENT if spoilt else WeightsState.VALID
        assert (facts.weights.state, facts.weights.version) == (whole, "default")
        assert facts.loras == ()
        assert engine.generate() == "tokens"
        again = await gateway.carry_out(KEEP)
        assert again.state is S.SUCCEEDED


async def _carried_out(gateway: VllmGateway, case: Case, rpc: str) -> None:
    """Until the call has done what it does: the double stalls right after that."""
    engine = gateway.engine
    seen: dict[str, Callable[[], bool]] = {
        "PauseGeneration": lambda: engine.paused,
        "ResumeGeneration": lambda: not engine.paused,
        "Sleep": lambda: bool(engine.asleep),
        "WakeUp": lambda: len(engine.asleep) < 2,
        "StartWeightUpdate": lambda: engine.session,
        "FinishWeightUpdate": lambda: not engine.session,
        "InitWeightTransferEngine": lambda: engine.initialised,
        "UpdateWeights": lambda: True,
    }
    await until(seen.get(rpc, lambda: case.done(engine)))
