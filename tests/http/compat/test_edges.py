"""What surrounds the endpoints: policy, audit, limits, and outcomes that nobody knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.http.compat.vllm.table import VLLM
from tests.doubles.engine import Fault
from tests.http.compat.layered import Layered, layered
from tests.http.full import FULL

pytestmark = pytest.mark.anyio


def policy(issuer: str) -> str:
    return f"""
require_reason = ["resume"]
[[rules]]
name = "root"
who = {{ issuer = "{issuer}", subject = "ada" }}
scopes = "as_granted"
engines = "all"
[[rules]]
name = "others"
who = {{ issuer = "{issuer}", subject = "bob" }}
scopes = "as_granted"
engines = {{ id = ["another"] }}
"""


async def test_an_engine_out_of_sight_is_none(tmp_path: Path) -> None:
    async with layered(tmp_path, policy=policy) as vllm:
        auth = vllm.gate.auth(subject="bob")
        hidden, missing = [
            await vllm.gate.http.post(f"/compat/vllm/{engine}/pause", headers=auth)
            for engine in (FULL, "nobody")
        ]
        assert hidden.status_code == missing.status_code == 404
        told = [answer.json() for answer in (hidden, missing)]
        for body in told:
            for name in ("instance", "request_id", "trace_id"):
                body.pop(name)
        assert told[0] == told[1]
        assert set(hidden.headers) == set(missing.headers)
        # There is no place for words of the caller's own, which this policy wants of a resume.
        await vllm.does("/pause?mode=keep")
        refused = await vllm.post("/resume")
        assert refused.status_code == 400
        assert await vllm.kinds() == ["pause"]


async def test_refusals_are_in_the_audit(vllm: Layered) -> None:
    assert (await vllm.post("/start_weight_update")).status_code == 409
    assert (await vllm.post("/pause", {"mode": "keep"})).status_code == 400
    assert (await vllm.post("/collective_rpc", {"method": "x"})).status_code == 403
    listed = await vllm.gate.get("/v1/audit")
    told = {one["action"]: one for one in listed.json()["items"]}
    for action in ("vllm_start_weight_update", "vllm_pause", "vllm_collective_rpc"):
        assert told[action]["outcome"] in ("refused", "denied")
        assert told[action]["engine"] == FULL
        assert told[action]["principal"]["subject"] == "ada"


async def test_who_can_not_wait_orders_nothing(vllm: Layered) -> None:
    waiting = vllm.gate.rooms.waiting
    waiting.count += waiting.most
    answer = await vllm.post("/pause")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    waiting.count -= waiting.most
    assert await vllm.operations() == []


@pytest.mark.long
async def test_an_outcome_that_nobody_knows_is_not_made_up(tmp_path: Path) -> None:
    async with layered(tmp_path, operation_deadline_ms={"pause": 1000}) as vllm:
        double = vllm.full.double
        double.fail_next("Pause", Fault.LOSE_REPLY)
        double.fail_next("GetOperation", *[Fault.REFUSE_CONNECTION] * 1000)
        answer = await vllm.post("/pause?mode=keep")
        assert answer.status_code == 504
        assert answer.json()["error"].startswith("Failed to pause generation: It is not known")
        (operation,) = await vllm.operations()
        assert operation["state"] == "reconciling"
        assert operation["id"] in answer.text
        double.take_all("GetOperation")
        assert await vllm.does("/pause?mode=keep") == {"status": "paused"}
        assert await vllm.kinds() == ["pause"]


@pytest.mark.long
async def test_a_piece_may_name_many_tensors(vllm: Layered) -> None:
    """More than any other body may have, as the big models need."""
    names = [f"model.layers.{n}.mlp.experts.{n}.down_proj.weight" for n in range(20_000)]
    count = len(names)
    info = {"names": names, "dtype_names": ["bfloat16"] * count, "shapes": [[1]] * count}
    group = {"master_address": "::1", "master_port": 1, "rank_offset": 1, "world_size": 3}
    await vllm.does("/init_weight_transfer_engine", {"init_info": group})
    await vllm.does("/pause?mode=keep")
    await vllm.does("/start_weight_update")
    assert len(json.dumps(info)) > 1 << 20
    await vllm.does("/update_weights", {"update_info": info})
    await vllm.does("/shutdown_weight_transfer_engine")
    large = await vllm.post("/pause", {"names": names})
    assert large.status_code == 413


ODD: tuple[Any, ...] = (
    None, True, -1, 10**40, 1.5, "", "\x00", "\ud800", "a\nb", "x" * 5000, [], [1], [[10**30]],
    {}, {"path": "\x00"}, {"path": "/w/\ud800"}, {"master_address": "\x00", "master_port": 10**40},
    {"names": ["a"], "dtype_names": [1], "shapes": [[-1]], "packed_num_buffers": "x"},
)  # fmt: skip
NAMES = (
    "request_ids", "init_info", "update_info", "weight_version", "lora_name", "lora_path",
    "max_iterations", "new_data_parallel_size", "drain_timeout",
)  # fmt: skip


@pytest.mark.long
async def test_nothing_that_can_be_sent_is_a_defect_here(vllm: Layered) -> None:
    for row in VLLM.rows:
        if row.methods[0] != "POST" or not row.backed(vllm.engine.offered):
            continue
        for value in ODD:
            content = json.dumps(dict.fromkeys(NAMES, value)).encode()
            headers = {"content-type": "application/json"}
            for query in ("", "?mode=%00&level=%ff&tags=9999999999&clear_cache="):
                path = f"{row.path}{query}"
                answer = await vllm.call("POST", path, content=content, headers=headers)
                assert answer.status_code < 500 or answer.status_code == 501, (row.path, value)
