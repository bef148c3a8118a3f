"""Weights: from disk, and in pieces with and without their begin and end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.domain.kinds import PauseMode, WeightSourceKind
from app.domain.operation import Actor
from app.enginekit.runtime import Order, RuntimeFault
from app.http.compat.announcements import Announced
from tests.http.compat.layered import Layered, LayeredEngine, layered

pytestmark = pytest.mark.anyio

GROUP = {"master_address": "::1", "master_port": "29500", "rank_offset": 1, "world_size": "3"}
PIECE = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, "2"]]}
ADDRESS = "/update_weights_from_distributed"


async def version(sglang: Layered) -> Any:
    return (await sglang.reads("/weight_version"))["weight_version"]


async def last(sglang: Layered) -> dict[str, Any]:
    return (await sglang.operations())[-1]


async def refused(sglang: Layered, path: str, body: Any) -> str:
    answer = await sglang.post(path, body)
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert told["success"] is False
    return str(told["message"])


@pytest.mark.long
async def test_from_disk(sglang: Layered) -> None:
    body = {"model_path": "/weights/v2", "weight_version": "v2", "token_step": 3, "zzz": 1}
    for _ in range(2):
        told = await sglang.does("/update_weights_from_disk", body)
        assert list(told) == ["success", "message", "num_paused_requests"]
        assert told["success"] is True
    assert await version(sglang) == "v2"
    assert await sglang.kinds() == ["update_weights"]
    request = (await last(sglang))["request"]
    assert request["admission"]["pause"]["mode"] == "drain"
    assert request["cache_policy"] == "flush"
    # Without a name the files may be others, and it is done again.
    for _ in range(2):
        await sglang.does("/update_weights_from_disk", {"model_path": "/weights/v2"})
    assert await version(sglang) == "v2"
    assert await sglang.kinds() == ["update_weights"] * 3


@pytest.mark.long
async def test_from_disk_under_pauses(sglang: Layered) -> None:
    body = {"model_path": "/weights/v2"}
    await sglang.does("/update_weights_from_disk", {**body, "abort_all_requests": True})
    assert (await last(sglang))["request"]["admission"]["pause"]["mode"] == "abort"
    await sglang.does("/pause_generation", {"mode": "in_place"})
    await sglang.does("/update_weights_from_disk", body)
    request = (await last(sglang))["request"]
    assert (request["cache_policy"], list(request["admission"])) == ("keep", ["under_pause"])
    await sglang.does("/update_weights_from_disk", {**body, "abort_all_requests": True})
    assert await sglang.kinds() == [
        *("update_weights", "pause", "update_weights", "abort_requests", "update_weights")
    ]
    assert sglang.engine.paused is PauseMode.KEEP


@pytest.mark.long
async def test_what_would_end_sglang_is_not_sent(sglang: Layered) -> None:
    for body in (
        {"model_path": "org/model"},
        {"model_path": ""},
        {"model_path": "/"},
        {"model_path": "/w", "load_format": "bogus"},
        {"model_path": "/w", "manifest": {"a": 1}},
        {"model_path": "/w", "recapture_cuda_graph": True},
        {"model_path": "/w", "weight_version": ""},
    ):
        await refused(sglang, "/update_weights_from_disk", body)
    wrong: tuple[dict[str, Any], ...] = (
        *({"group_name": ""}, {"backend": "mpi"}),
        *({"world_size": 2}, {"master_port": 0}),
    )
    for other in wrong:
        await refused(sglang, "/init_weights_update_group", {**GROUP, **other})
    assert "no such group" in await refused(sglang, "/destroy_weights_update_group", {})
    assert await sglang.operations() == []


async def test_pieces_between_begin_and_end(sglang: Layered) -> None:
    await sglang.does("/init_weights_update_group", GROUP)
    for _ in range(2):
        await sglang.does("/begin_weight_update", {})
    for name in ("a", "b"):
        piece = {**PIECE, "names": [name], "weight_version": "v2"}
        for _ in range(2):
            await sglang.does(ADDRESS, piece)
    assert await version(sglang) == "v1"
    # It is not the pause's end that ends it.
    held = await sglang.post("/continue_generation", {})
    assert held.status_code == 400
    assert "is open" in await refused(sglang, "/begin_weight_update", {})
    for _ in range(2):
        await sglang.does("/end_weight_update", {})
    assert await version(sglang) == "v2"
    assert await sglang.kinds() == ["update_weights"]
    assert (await sglang.call("GET", "/ready")).status_code == 200


class Careful(LayeredEngine):
    """It receives nothing while it serves."""

    async def open_session(self, order: Order, rank: int) -> None:
        if self.paused is None:
            raise RuntimeFault("NOT_PAUSED", "it serves", code="FAILED_PRECONDITION")
        await super().open_session(order, rank)


@pytest.mark.long
async def test_an_engine_that_receives_only_while_it_is_paused(tmp_path: Path) -> None:
    async with layered(tmp_path, layer="sglang", engine=Careful) as sglang:
        await sglang.does("/init_weights_update_group", GROUP)
        for number in (1, 2):
            await sglang.does("/begin_weight_update", {})
            for _ in range(2):
                await sglang.does(ADDRESS, {**PIECE, "weight_version": f"v{number}"})
            assert sglang.engine.paused is PauseMode.DRAIN
            await sglang.does("/end_weight_update", {})
            assert await version(sglang) == f"v{number}"
            assert (await sglang.call("GET", "/ready")).status_code == 200
        # What is called off opens it again, and a pause that was asked for stays.
        await sglang.does("/begin_weight_update", {})
        await sglang.does(ADDRESS, PIECE)
        await sglang.does("/destroy_weights_update_group", {})
        assert (await sglang.call("GET", "/ready")).status_code == 200
        await sglang.does("/init_weights_update_group", GROUP)
        await sglang.does("/pause_generation", {})
        await sglang.does("/begin_weight_update", {})
        await sglang.does(ADDRESS, PIECE)
        await sglang.does("/end_weight_update", {})
        assert sglang.engine.paused is PauseMode.ABORT


@pytest.mark.long
async def test_pieces_alone_end_with_what_relies_on_them(sglang: Layered) -> None:
    await sglang.does("/init_weights_update_group", GROUP)
    assert "pause" in await refused(sglang, ADDRESS, PIECE)
    for number, path in enumerate(
        ("/continue_generation", "/flush_cache", "/resume_memory_occupation")
    ):
        await sglang.does("/pause_generation", {})
        await sglang.does(ADDRESS, {**PIECE, "weight_version": f"by-{number}"})
        answer = await sglang.post(path, {})
        assert answer.status_code == 200, answer.text
        assert await version(sglang) == f"by-{number}"
        await sglang.does("/continue_generation", {})
    await sglang.does("/pause_generation", {})
    await sglang.does(ADDRESS, {**PIECE, "weight_version": "given up"})
    await sglang.does("/pause_generation", {})
    assert await version(sglang) == "by-2"
    await sglang.does(ADDRESS, {**PIECE, "weight_version": "given up too"})
    await sglang.does("/destroy_weights_update_group", {})
    await sglang.does("/continue_generation", {})
    assert await version(sglang) == "by-2"
    assert "no such group" in await refused(sglang, ADDRESS, PIECE)


@pytest.mark.long
async def test_the_pieces_of_one_update_belong_together(sglang: Layered) -> None:
    await sglang.does("/init_weights_update_group", GROUP)
    await sglang.does("/pause_generation", {})
    await sglang.does(ADDRESS, {**PIECE, "weight_version": "v2"})
    others: tuple[dict[str, Any], ...] = (
        {"weight_version": "v3"},
        {"group_name": "another"},
        {"names": ["a", "b"]},
        {"names": []},
        {"dtypes": ["nosuch"]},
        {"shapes": [[-1]]},
        {"load_format": "flattened_bucket"},
    )
    for other in others:
        await refused(sglang, ADDRESS, {**PIECE, **other})
    assert "is open" in await refused(sglang, "/update_weights_from_disk", {"model_path": "/w"})
    await sglang.does(ADDRESS, PIECE)
    await sglang.does("/continue_generation", {})
    assert await version(sglang) == "v2"


@pytest.mark.long
async def test_a_group_of_that_name_is_destroyed_first(sglang: Layered) -> None:
    for _ in range(2):
        await sglang.does("/init_weights_update_group", GROUP)
    other = {**GROUP, "master_port": 29501}
    assert "destroy it first" in await refused(sglang, "/init_weights_update_group", other)
    await sglang.does("/destroy_weights_update_group", {})
    await sglang.does("/init_weights_update_group", other)


@pytest.mark.long
async def test_another_gateway_knows_the_group_by_the_ledger(sglang: Layered) -> None:
    await sglang.does("/init_weights_update_group", GROUP)
    await sglang.does("/pause_generation", {})
    await sglang.does(ADDRESS, {**PIECE, "weight_version": "v2"})
    _forgotten(sglang)
    await sglang.does("/continue_generation", {})
    assert await version(sglang) == "v2"
    await sglang.does("/pause_generation", {})
    await sglang.does(ADDRESS, {**PIECE, "weight_version": "v3"})
    await sglang.does("/continue_generation", {})
    assert await version(sglang) == "v3"


def _forgotten(sglang: Layered) -> None:
    """So much has been said by others since."""
    for number in range(2000):
        other = Actor("issuer", f"trainer-{number}", "client")
        sglang.gate.rooms.announcements.keep(sglang.engine_id, other, Announced())


@pytest.mark.long
async def test_an_engine_that_takes_files_in_pieces_alone(sglang: Layered) -> None:
    sources = frozenset({WeightSourceKind.SESSION.value})
    sglang.engine.offered = replace(sglang.engine.offered, weight_sources=sources)
    await sglang.gate.rooms.fleet.discover(sglang.engine_id)
    body = {"model_path": "/weights/v2", "weight_version": "v2"}
    await sglang.does("/update_weights_from_disk", body)
    assert await version(sglang) == "v2"
