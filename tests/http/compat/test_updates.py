"""Weights that come in several calls, and are one operation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from app.domain.kinds import PauseMode, WeightSourceKind
from tests.doubles.engine import running_engine
from tests.enginekit.client import until as settled
from tests.enginekit.minimal_engine import fault, until
from tests.http.compat.layered import Layered, LayeredEngine, layered
from tests.http.full import full_engine
from tests.http.gateway import gateway

pytestmark = pytest.mark.anyio

PIECE = {"update_info": {"path": "/weights/step-1/model.safetensors"}}
GROUP = {"master_address": "127.0.0.1", "master_port": "29500", "rank_offset": 1, "world_size": 3}
TENSORS = {"names": ["w"], "dtype_names": ["torch.bfloat16"], "shapes": [[2, 2]]}


async def begun(vllm: Layered, info: dict[str, Any] | None = None, **how: Any) -> None:
    await vllm.does("/init_weight_transfer_engine", {"init_info": info or {}}, **how)
    await vllm.does("/pause?mode=keep", **how)
    await vllm.does("/start_weight_update", {"is_checkpoint_format": True}, **how)


@pytest.mark.long
async def test_an_update_is_one_operation(vllm: Layered) -> None:
    await begun(vllm)
    assert await vllm.does("/update_weights", PIECE) == {"message": "Weights updated"}
    finish = {"weight_version": "step-1"}
    told = await vllm.does("/finish_weight_update", finish)
    assert told == {"message": "Weight update finished"}
    await vllm.does("/resume")
    assert await vllm.reads("/weight_info") == {"weight_version": "step-1"}
    assert await vllm.kinds() == ["pause", "update_weights", "resume"]
    update = (await vllm.operations())[1]
    assert (update["state"], update["result"]["weight_version"]) == ("succeeded", "step-1")


@pytest.mark.long
async def test_without_a_version_it_stays(vllm: Layered) -> None:
    await begun(vllm)
    await vllm.does("/update_weights", PIECE)
    await vllm.does("/finish_weight_update")
    assert await vllm.reads("/weight_info") == {"weight_version": "v1"}


@pytest.mark.long
async def test_what_was_cached_goes_unless_requests_are_frozen_with_it(vllm: Layered) -> None:
    for mode, policy in (("keep", "keep"), ("abort", "flush"), ("wait", "flush")):
        await vllm.does(f"/pause?mode={mode}&clear_cache=false")
        await vllm.does("/start_weight_update")
        await vllm.does("/update_weights", PIECE)
        await vllm.does("/finish_weight_update")
        await vllm.does("/resume")
        update = (await vllm.operations())[-2]
        assert update["request"]["cache_policy"] == policy


@pytest.mark.long
async def test_each_call_may_come_twice(vllm: Layered) -> None:
    version = {"weight_version": "step-1"}
    await vllm.does("/pause?mode=keep")
    for path, body in (
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/start_weight_update", None),
        ("/update_weights", PIECE),
        ("/finish_weight_update", version),
    ):
        first, second = await vllm.does(path, body), await vllm.does(path, body)
        assert first == second
    assert await vllm.kinds() == ["pause", "update_weights"]
    assert list(vllm.engine.staged.values()) == [[0], [0]]
    other = await vllm.post("/finish_weight_update", {"weight_version": "step-2"})
    assert other.status_code == 409
    # The next step's are others, also where they look the same.
    await vllm.does("/resume")
    await begun(vllm)
    await vllm.does("/update_weights", PIECE)
    await vllm.does("/finish_weight_update", version)
    assert (await vllm.kinds()).count("update_weights") == 2


async def test_each_call_may_come_twice_at_once(vllm: Layered) -> None:
    """As from a client that waits less long than the engine takes, and tries again."""
    await vllm.does("/init_weight_transfer_engine", {"init_info": GROUP})
    await vllm.does("/pause?mode=keep")
    for path, body in (
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": TENSORS}),
        ("/finish_weight_update", {"weight_version": "step-1"}),
    ):
        first, second = await asyncio.gather(vllm.does(path, body), vllm.does(path, body))
        assert first == second
    assert await vllm.kinds() == ["pause", "update_weights"]
    assert list(vllm.engine.staged.values()) == [[0], [0]]
    await vllm.does("/start_weight_update")
    shutting = [vllm.does("/shutdown_weight_transfer_engine") for _ in range(2)]
    first, second = await asyncio.gather(*shutting)
    assert first == second


@pytest.mark.long
async def test_pieces_of_a_group(vllm: Layered) -> None:
    await begun(vllm, GROUP)
    session = (await vllm.operations())[-1]["request"]["source"]["session"]
    assert session["transfer"] == {
        "nccl": {
            "address": "127.0.0.1",
            "port": 29500,
            "world_size": 3,
            "rank_offset": 1,
            "backend": "nccl",
            "group": "",
            "source_rank": 0,
        }
    }
    other = {**TENSORS, "names": ["v"], "packed": True, "packed_num_buffers": 2}
    for info in (TENSORS, other):
        await vllm.does("/update_weights", {"update_info": info})
    assert set(map(tuple, vllm.engine.staged.values())) == {(0, 1)}
    await vllm.does("/finish_weight_update")
    await vllm.does("/start_weight_update")  # the group is known still


@pytest.mark.long
async def test_pieces_that_come_at_once(vllm: Layered) -> None:
    await begun(vllm, GROUP)
    infos = [{**TENSORS, "names": [f"w{number}"]} for number in range(6)]
    answers = await asyncio.gather(
        *(vllm.post("/update_weights", {"update_info": info}) for info in infos)
    )
    assert {answer.status_code for answer in answers} == {200}
    await vllm.does("/finish_weight_update")


async def test_an_engine_that_serves_is_not_taken_apart(vllm: Layered) -> None:
    await vllm.does("/init_weight_transfer_engine", {"init_info": GROUP})
    refused = await vllm.post("/start_weight_update")
    assert (refused.status_code, "not paused" in refused.text) == (409, True)
    await vllm.does("/sleep")
    refused = await vllm.post("/start_weight_update")
    assert (refused.status_code, "asleep" in refused.text) == (409, True)
    await vllm.does("/wake_up")
    # A start whose pieces come from disk is judged again when the first of them comes.
    await begun(vllm)
    await vllm.does("/resume")
    refused = await vllm.post("/update_weights", PIECE)
    assert (refused.status_code, "not paused" in refused.text) == (409, True)
    assert "update_weights" not in await vllm.kinds()


@pytest.mark.long
async def test_a_piece_that_fails_ends_the_update_and_a_good_one_follows(vllm: Layered) -> None:
    vllm.engine.script("stage", fault)
    await begun(vllm)
    failed = await vllm.post("/update_weights", PIECE)
    assert failed.status_code == 500
    assert "rank" in failed.json()["error"]["message"]
    assert (await vllm.post("/finish_weight_update")).status_code == 409
    assert await vllm.reads("/weight_info") == {"weight_version": "v1"}
    vllm.engine.scripts.clear()
    await vllm.does("/start_weight_update")
    await vllm.does("/update_weights", PIECE)
    await vllm.does("/finish_weight_update", {"weight_version": "step-2"})
    await vllm.does("/resume")


@pytest.mark.long
async def test_weights_that_are_neither_old_nor_new_do_not_serve(vllm: Layered) -> None:
    await begun(vllm)
    await vllm.does("/update_weights", PIECE)
    vllm.engine.script("commit", fault, 1)
    vllm.engine.script("rollback", fault, 0)
    assert (await vllm.post("/finish_weight_update")).status_code == 500
    vllm.engine.scripts.clear()
    refused = await vllm.post("/resume")
    assert (refused.status_code, "inconsistent" in refused.text) == (409, True)
    assert vllm.engine.paused is PauseMode.KEEP
    await vllm.does("/start_weight_update")
    await vllm.does("/update_weights", PIECE)
    await vllm.does("/finish_weight_update", {"weight_version": "step-2"})
    await vllm.does("/resume")


@pytest.mark.long
async def test_an_open_update_can_be_called_off(vllm: Layered) -> None:
    await begun(vllm)
    await vllm.does("/update_weights", PIECE)
    second = await vllm.post("/start_weight_update")
    assert (second.status_code, "open" in second.text) == (409, True)
    down = {"message": "Weight transfer shut down"}
    assert await vllm.does("/shutdown_weight_transfer_engine") == down
    assert await vllm.does("/shutdown_weight_transfer_engine") == down
    assert (await vllm.operations())[-1]["state"] == "cancelled"
    await vllm.does("/resume")


@pytest.mark.long
async def test_an_update_belongs_to_whoever_began_it(vllm: Layered) -> None:
    await begun(vllm, subject="bob")
    await vllm.does("/update_weights", PIECE, subject="bob")
    assert (await vllm.post("/update_weights", PIECE)).status_code == 409
    assert (await vllm.post("/finish_weight_update")).status_code == 409
    await vllm.does("/finish_weight_update", subject="bob")


@pytest.mark.long
async def test_a_caller_who_leaves_ends_nothing(vllm: Layered) -> None:
    goes = asyncio.Event()
    vllm.engine.script("stage", until(goes))
    await begun(vllm)
    call = asyncio.create_task(vllm.post("/update_weights", PIECE))
    await settled(lambda: any(call.phase == "stage" for call in vllm.engine.calls))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    goes.set()
    await vllm.does("/update_weights", PIECE)
    await vllm.does("/finish_weight_update")
    assert await vllm.kinds() == ["pause", "update_weights"]


@pytest.mark.long
async def test_members_of_one_group_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Each is in the middle of a broadcast that ends when all of them are."""
    one: dict[str, Any] = {"layer": "vllm", "engines": ("full", "other")}
    async with (
        gateway(tmp_path / "data", compat=(one,)) as gate,
        full_engine(gate, tmp_path / "full", LayeredEngine) as full,
        running_engine(
            tmp_path / "other", make_engine=lambda: LayeredEngine(world_size=2)
        ) as other,
    ):
        member = {"rank": 0, "admin": other.admin_address, "control": other.admin_address}
        body = {"id": "other", "members": [member]}
        await gate.http.post("/v1/engines", json=body, headers=gate.auth())
        await gate.rooms.fleet.discover("other")
        both = [Layered(gate, full), Layered(gate, full, engine_id="other")]
        broadcast = asyncio.Barrier(4)  # two ranks of two engines

        async def takes_part(_order: Any, _rank: int) -> None:
            await broadcast.wait()

        for engine in (full.engine, cast("LayeredEngine", other.engine)):
            engine.script("stage", takes_part)
        info = {"update_info": TENSORS}
        await asyncio.gather(*(begun(vllm, GROUP) for vllm in both))
        await asyncio.gather(*(vllm.does("/update_weights", info) for vllm in both))
        await asyncio.gather(*(vllm.does("/finish_weight_update") for vllm in both))


@pytest.mark.long
async def test_drafts_are_another_component(vllm: Layered) -> None:
    await vllm.does("/pause?mode=keep")
    told = await vllm.does("/start_draft_weight_update")
    assert told == {"message": "Draft weight update started"}
    await vllm.does("/update_weights", PIECE)
    await vllm.does("/finish_weight_update")
    assert (await vllm.operations())[-1]["request"]["components"] == ["draft"]


class WholeEngine(LayeredEngine):
    """Takes a checkpoint by one order, and no pieces."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        disk = frozenset({WeightSourceKind.DISK.value})
        self.offered = replace(self.offered, weight_sources=disk, weight_sessions=frozenset())


@pytest.mark.long
async def test_an_engine_that_takes_checkpoints_whole(tmp_path: Path) -> None:
    async with layered(tmp_path, engine=WholeEngine) as vllm:
        await begun(vllm)
        digest = "ab" * 32
        info = {"path": "/weights/step-1", "files": {"model.safetensors": digest}}
        for _ in range(2):
            await vllm.does("/update_weights", {"update_info": info})
        other = await vllm.post("/update_weights", PIECE)
        assert other.status_code == 400
        assert await vllm.kinds() == ["pause"]
        finish = {"weight_version": "step-1"}
        answers = await asyncio.gather(*(vllm.post("/finish_weight_update", finish) for _ in "ab"))
        assert {answer.status_code for answer in answers} == {200}
        await vllm.does("/finish_weight_update", finish)
        await vllm.does("/resume")
        assert await vllm.kinds() == ["pause", "update_weights", "resume"]
        update = (await vllm.operations())[1]
        assert update["request"]["source"] == {
            "disk": {
                "path": "/weights/step-1",
                "digests": [{"name": "model.safetensors", "sha256": digest}],
            }
        }
        assert await vllm.reads("/weight_info") == {"weight_version": "step-1"}
        # One that fails is over, and nothing of it stays behind.
        await begun(vllm)
        await vllm.does("/update_weights", {"update_info": {"path": "/part"}})
        vllm.engine.script("prepare", fault)
        assert (await vllm.post("/finish_weight_update")).status_code == 500
        vllm.engine.scripts.clear()
        assert (await vllm.post("/finish_weight_update")).status_code == 409
        group = await vllm.post("/init_weight_transfer_engine", {"init_info": GROUP})
        assert group.status_code == 501


async def test_what_was_started_under_another_pause_is_not_finished(tmp_path: Path) -> None:
    """As what one of two gateways remembers of a step that the other one has ended."""
    async with layered(tmp_path, engine=WholeEngine) as vllm:
        await vllm.does("/pause?mode=keep")
        await vllm.does("/start_weight_update")
        await vllm.does("/update_weights", PIECE)
        await vllm.does("/resume")
        await vllm.does("/pause?mode=keep")
        for path, body in (
            ("/finish_weight_update", {"weight_version": "step-2"}),
            ("/update_weights", PIECE),
        ):
            assert (await vllm.post(path, body)).status_code == 409
        assert await vllm.kinds() == ["pause", "resume", "pause"]
        assert await vllm.reads("/weight_info") == {"weight_version": "v1"}
