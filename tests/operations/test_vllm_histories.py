"""Orders and mishaps in random order, on one member and on two: after each of them what is said of
the engine is so, and no request would have killed it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.domain.commands import (
    Command,
    LoadLora,
    Pause,
    PauseAround,
    ReleaseResources,
    RestoreResources,
    Resume,
    SetWeightVersion,
    UnloadLora,
    UpdateWeights,
)
from app.domain.errors import ChadburnError
from app.domain.facts import EngineFacts
from app.domain.kinds import (
    Admission,
    ContentPolicy,
    DrainRule,
    OperationState,
    PauseMode,
    ResourceKind,
    WeightsState,
)
from app.domain.operation import Operation
from app.domain.weight_sessions import CommitSession
from app.operations.settling import Settlements, Statement
from tests.doubles.vllm_control import C, VllmControl
from tests.operations.gateway import CALLER, until
from tests.operations.test_vllm_weights import chunk, go_on, session
from tests.operations.vllm import VllmGateway, vllm_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.long]

STEPS = 12
BOTH = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE)
UPDATE = (
    "InitWeightTransferEngine",
    "PauseGeneration",
    "StartWeightUpdate",
    "UpdateWeights",
    "FinishWeightUpdate",
    "ResumeGeneration",
)
MISHAPS = ("reply lost", "error", "not sent", "gateway before", "gateway after", "member")


@dataclass(frozen=True)
class Sort:
    """`rpcs`: what it calls. `done`: how a member is when it has been carried out."""

    make: Callable[[random.Random, EngineFacts], Command]
    rpcs: tuple[str, ...]
    done: Callable[[Any, VllmControl], bool]


def pausing(mode: PauseMode) -> Sort:
    return Sort(lambda _r, _f: Pause(mode=mode), ("PauseGeneration",), lambda _, m: m.paused)


def release(r: random.Random, _facts: EngineFacts) -> Command:
    content = r.choice(list(ContentPolicy))
    return ReleaseResources(resources=BOTH, content=content, drain=DrainRule.ABORT)


def restore(r: random.Random, facts: EngineFacts) -> Command:
    wanted = r.choice((BOTH, BOTH[:1], BOTH[1:]))
    return RestoreResources(resources=wanted, release_epoch=max(facts.release_epoch, 1))


def new_weights(r: random.Random, _facts: EngineFacts) -> Command:
    around = PauseAround(r.choice(list(PauseMode)))
    return session(weight_version=f"w{r.randrange(999)}", admission=around)


SORTS = (
    *(pausing(mode) for mode in PauseMode),
    Sort(
        lambda _, facts: Resume(pause_epoch=max(facts.pause_epoch, 1)),
        ("ResumeGeneration",),
        lambda _, member: not member.paused,
    ),
    Sort(release, ("Sleep",), lambda _, member: bool(member.asleep)),
    Sort(
        restore,
        ("WakeUp", "PauseGeneration"),
        lambda order, member: not member.asleep & {kind.value for kind in order.resources},
    ),
    Sort(
        lambda r, _: SetWeightVersion(weight_version=f"n{r.randrange(99)}"),
        ("UpdateWeightVersion",),
        lambda order, member: member.weight_version == order.weight_version,
    ),
    Sort(
        lambda r, _: LoadLora(name=r.choice("ab"), path="/x"),
        ("LoadLora",),
        lambda order, member: order.name in member.loras,
    ),
    Sort(
        lambda r, _: UnloadLora(name=r.choice("ab")),
        ("UnloadLora",),
        lambda order, member: order.name not in member.loras,
    ),
    *[
        Sort(
            new_weights,
            UPDATE,
            lambda order, m: (m.weights, m.weight_version) == ("new", order.weight_version),
        )
    ]
    * 2,
)


@pytest.mark.parametrize("seed", range(16))
async def test_a_history(tmp_path: Path, seed: int) -> None:
    r = random.Random(seed)
    async with vllm_gateway(tmp_path, 1 + seed % 2) as gateway:
        history: list[Any] = []
        revision = 0
        for _ in range(STEPS):
            facts = await gateway.facts()
            assert facts.revision >= revision, history
            revision = facts.revision
            sort = r.choice(SORTS)
            command = sort.make(r, facts)
            mishap = r.choice((None, None, *MISHAPS))
            place, rpc = r.randrange(len(gateway.controls)), r.choice(sort.rpcs)
            history.append([command.kind.value, mishap, rpc, place])
            answer = _prepare(gateway.controls[place].control, rpc, mishap)
            ended = await _carried_out(gateway, command, mishap, place, rpc, answer)
            for one in gateway.controls:
                one.control.hangs.clear()
                one.control.stalls.clear()
                one.control.fails.clear()
                one.control.loses.clear()
            answer.set()
            if ended is None:
                continue
            history[-1] += [ended.state.value, ended.error and ended.error.reason]
            members = [one.control for one in gateway.controls]
            if ended.state is OperationState.SUCCEEDED:
                assert all(sort.done(command, member) for member in members), history
            _hold(await gateway.facts(), members, history)


def _prepare(member: VllmControl, rpc: str, mishap: str | None) -> asyncio.Event:
    answer = asyncio.Event()
    match mishap:
        case "reply lost":
            member.loses.add(rpc)
        case "error":
            member.fails[rpc] = [(C.INTERNAL, "x")]
        case "not sent":
            member.fails[rpc] = [(C.UNAVAILABLE, "x")]
        case "gateway before" | "member":
            member.hangs[rpc] = answer
        case "gateway after":
            member.stalls[rpc] = answer
    return answer


async def _carried_out(
    gateway: VllmGateway,
    command: Command,
    mishap: str | None,
    place: int,
    rpc: str,
    answer: asyncio.Event,
) -> Operation | None:
    """None: it was refused. What stays unknown a person ends."""
    member = gateway.controls[place]
    made = len(member.control.named(rpc))
    try:
        order = await gateway.give(command)
    except ChadburnError:
        return None
    if isinstance(command, UpdateWeights):
        with suppress(ChadburnError):
            await go_on(gateway, chunk())
            await go_on(gateway, CommitSession(1))

    async def over() -> bool:
        return (await gateway.state_of(order)).terminal

    async def called() -> bool:
        return len(member.control.named(rpc)) > made or await over()

    if mishap in ("gateway before", "gateway after", "member"):
        await until(called)
        if mishap != "member":
            await gateway.stop()
        elif not await over():
            member.control.hangs.clear()
            await member.restart()
        member.control.hangs.clear()
        member.control.stalls.clear()
        answer.set()
        if mishap != "member":
            await gateway.start()

    looked = len(gateway.engine.named("IsPaused"))

    async def decided() -> bool:
        if await over():
            return True
        # Asked so often in vain, it can't be told apart from what was before.
        in_vain = len(gateway.engine.named("IsPaused")) > looked + 20
        return in_vain and isinstance(command, Pause)

    await until(decided)
    if not await over():
        stated = Statement(end=OperationState.FAILED, reason="looked at it")
        settlements = Settlements(gateway.ledger, gateway.runner, gateway.clock)
        with suppress(ChadburnError):  # it was found out meanwhile
            await settlements.settle(order.id, stated, CALLER)
    return await gateway.end_of(order)


def _hold(facts: EngineFacts, members: list[VllmControl], history: list[Any]) -> None:
    paused = {member.paused for member in members}
    told = Admission.UNKNOWN
    if len(paused) == 1:
        told = Admission.PAUSED if paused.pop() else Admission.OPEN
    assert facts.admission is told, (history, facts)
    released = {kind.value for kind in facts.released}
    for member in members:
        assert released >= member.asleep, (history, facts)
        if member.weights == "half" or member.discarded:
            unfit = (WeightsState.INCONSISTENT, WeightsState.MISSING)
            assert facts.weights.state in unfit, (history, facts)
        assert not member.dead, history
        if not member.paused:
            assert member.generate() == "tokens", (history, facts)
