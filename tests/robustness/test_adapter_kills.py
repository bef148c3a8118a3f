"""One rank killed while an adapter comes or goes: it is on all ranks afterwards, or on none."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest

from app.rpc.openengine.v1 import generation_pb2, lora_pb2
from tests.reference_engine.adapters import merged_checkpoint
from tests.reference_engine.calling import Heard
from tests.reference_engine.ranks import alive
from tests.reference_engine.serving import PATIENCE_S, PROMPT, eventually
from tests.robustness.stage import OPEN, TOKENS, VALID, Stage, fresh, stage

pytestmark = pytest.mark.anyio

NAME = "tone"
ENTRIES = {"prepare": "", "commit": "CommitChange", "conclude": "SettleChange"}


@dataclass(frozen=True, slots=True)
class Case:
    """``order`` is load or unload."""

    order: str
    phase: str
    point: str
    rank: int

    def __str__(self) -> str:
        return f"{self.order}-{self.phase}-{self.point}-rank{self.rank}"

    @property
    def entry(self) -> str:
        return f"{ENTRIES[self.phase] or f'Prepare{self.order.title()}'}.{self.point}"


def cases() -> Iterator[Case]:
    for order in ("load", "unload"):
        for phase in ENTRIES:
            for point in ("received", "applied", "acknowledged"):
                for rank in (0, 1):
                    yield Case(order, phase, point, rank)


@pytest.fixture(scope="module")
def tone(made: Stage) -> Path:
    return made.adapter


@pytest.fixture(scope="module")
def toned(
    versions: dict[str, Path], tone: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[int]:
    """What is said under the adapter."""
    target = tmp_path_factory.mktemp("merged") / NAME
    return list(fresh(merged_checkpoint(next(iter(versions.values())), tone, target), TOKENS))


@pytest.fixture(scope="module")
async def made(
    versions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("engine")
    async with stage(folder, versions, ranks=2, rank_timeout_s=60.0) as ready:
        yield ready


async def load(stage: Stage, tone: Path) -> Any:
    adapter = lora_pb2.LoraAdapter(lora_name=NAME, source_path=str(tone))
    request = lora_pb2.LoadLoraRequest(adapter=adapter)
    return await stage.clients.control.LoadLora(request, timeout=PATIENCE_S)


async def unload(stage: Stage) -> Any:
    request = lora_pb2.UnloadLoraRequest(lora_name=NAME)
    return await stage.clients.control.UnloadLora(request, timeout=PATIENCE_S)


async def is_loaded(stage: Stage) -> bool:
    request = lora_pb2.ListLorasRequest()
    told = await stage.clients.control.ListLoras(request, timeout=PATIENCE_S)
    return NAME in [adapter.lora_name for adapter in told.adapters]


async def said(stage: Stage, adapter: str = "") -> Heard:
    request = generation_pb2.GenerateRequest(
        request_id=uuid4().hex, prompt=PROMPT, lora_name=adapter
    )
    request.sampling.temperature = 0.0
    request.stopping.max_tokens = TOKENS
    request.stopping.ignore_eos = True
    return await stage.clients.send(request).whole()


async def serves_again(stage: Stage) -> bool:
    try:
        state = (await stage.clients.profile()).state
    except grpc.aio.AioRpcError:
        return False
    whole = state.admission == OPEN and state.weights.state == VALID
    return whole and not state.ranks and not state.open_operations


async def check(stage: Stage, case: Case, tone: Path, toned: list[int]) -> None:
    if await is_loaded(stage) and case.order == "load":
        await unload(stage)
    elif not await is_loaded(stage) and case.order == "unload":
        await load(stage, tone)
    passed = {rank: len(stage.faults.passed(rank)) for rank in stage.ranks}
    pid = stage.faults.pid(case.rank)
    stage.faults.arm(case.rank, case.entry, signal.SIGKILL)
    failure: str | None = None
    try:
        await (load(stage, tone) if case.order == "load" else unload(stage))
    except grpc.aio.AioRpcError as error:
        failure = error.details() or ""
    applied = failure is None
    assert not stage.faults.armed(case.rank), "the rank never came to that point"
    if failure is not None:
        assert f"rank {case.rank}" in failure
    else:
        assert case.point == "acknowledged"
        for rank in stage.ranks:
            assert "CommitChange.applied" in stage.faults.passed(rank)[passed[rank] :]

    async def replaced() -> bool:
        # That it is dead is no news to the engine yet, which still says that it serves.
        return not alive(pid) and stage.faults.pid(case.rank) != pid

    await eventually(replaced)
    await eventually(lambda: serves_again(stage))
    expected = applied is (case.order == "load")
    assert await is_loaded(stage) is expected
    under = await said(stage, NAME)
    if expected:
        assert under.ids == toned
    else:
        assert under.status is grpc.StatusCode.NOT_FOUND
        assert under.ids == []
    assert (await said(stage)).ids == stage.expected(await stage.version())


QUICK = {"load-commit-applied-rank1"}


@pytest.mark.parametrize("case", [case for case in cases() if str(case) in QUICK], ids=str)
async def test_a_rank_killed_within_an_order(
    made: Stage, case: Case, tone: Path, toned: list[int]
) -> None:
    await check(made, case, tone, toned)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in cases() if str(case) not in QUICK], ids=str)
async def test_every_point_of_both_orders(
    made: Stage, case: Case, tone: Path, toned: list[int]
) -> None:
    await check(made, case, tone, toned)
