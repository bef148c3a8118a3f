"""What ends a real SGLang when it is told so directly, told through Chadburn instead: the engine
generates afterwards, and what was said of the order is true.

Every call here, sent as it stands to SGLang 0.5.23, took the whole server down when it was
recorded; that is not repeated. The numbers are rows of the table in docs/sglang.md.
"""

from __future__ import annotations

import base64
import json
import pickle
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from tests.e2e.driving import Gateway
from tests.real.asking import generate, streaming
from tests.real.gateway import ENGINE
from tests.real.servers import Server
from tests.sglang.tensors import serialized, tensors_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def http(bridge: Gateway, engine: Server) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of SGLang whose base URL is all that changed. Afterwards the engine generates."""
    async with httpx2.AsyncClient(
        base_url=f"{bridge.url}/compat/sglang/{ENGINE}/",
        headers=bridge.client.headers,
        timeout=120,
    ) as client:
        yield client
        for path in ("resume_memory_occupation", "continue_generation"):
            await client.post(path, json={})
    assert engine.is_alive()


async def post(http: httpx2.AsyncClient, path: str, body: object) -> int:
    return (await http.post(path, json=body)).status_code


async def test_1_resumed_what_is_not_released(http: httpx2.AsyncClient) -> None:
    for body in ({}, {"tags": ["weights"]}, {}, {"tags": ["kv_cache"]}):
        assert await post(http, "resume_memory_occupation", body) == 200, body
    assert await post(http, "release_memory_occupation", {"tags": ["kv_cache"]}) == 200
    for body in ({"tags": ["weights"]}, {"tags": ["kv_cache"]}, {}, {}):
        assert await post(http, "resume_memory_occupation", body) == 200, body
    assert await post(http, "release_memory_occupation", {}) == 200
    for body in ({"tags": ["kv_cache"]}, {}, {"tags": ["weights"]}, {}):
        assert await post(http, "resume_memory_occupation", body) == 200, body


async def test_2_released_under_requests(http: httpx2.AsyncClient, engine: Server) -> None:
    with streaming(engine) as stream:
        # The request is waited for, or ended; SGLang is not told while it runs.
        assert await post(http, "release_memory_occupation", {}) == 200
        assert stream.ended.wait(60)
    assert await post(http, "resume_memory_occupation", {}) == 200


async def test_2_released_over_frozen_requests(http: httpx2.AsyncClient, engine: Server) -> None:
    with streaming(engine) as stream:
        assert await post(http, "pause_generation", {"mode": "in_place"}) == 200
        assert await post(http, "release_memory_occupation", {}) in (200, 400, 409)
        await post(http, "resume_memory_occupation", {})
        await post(http, "continue_generation", {})
        assert stream.ended.wait(60)


@pytest.mark.parametrize(
    ("name", "load_format"),
    [
        ("b-garbage", None),
        ("b-other-shape", None),
        ("b-cut-short", None),
        ("b", "bogus"),
    ],
)
async def test_3_weights_from_a_bad_checkpoint(
    http: httpx2.AsyncClient,
    engine: Server,
    models: Path,
    name: str,
    load_format: str | None,
) -> None:
    before = generate(engine)
    body: dict[str, Any] = {"model_path": str(models / name)}
    if load_format is not None:
        body["load_format"] = load_format
    assert await post(http, "update_weights_from_disk", body) == 400
    assert generate(engine) == before


def payloads(models: Path) -> dict[str, Any]:
    good = list(tensors_of(models / "b").items())[:2]
    other = [(good[0][0], torch.zeros(3, 5, dtype=torch.bfloat16))]
    return {
        "a good one": {"serialized_named_tensors": [serialized(good)]},
        "wrong shape": {"serialized_named_tensors": [serialized(other)]},
        "good, then bad": {"serialized_named_tensors": [serialized(good + other)]},
        "none": {"serialized_named_tensors": []},
        "no pickle": {"serialized_named_tensors": [base64.b64encode(b"garbage").decode()]},
        "not allowed": {
            "serialized_named_tensors": [base64.b64encode(pickle.dumps(Path("/"))).decode()]
        },
        "no pairs": {"serialized_named_tensors": [serialized({"a": 1})]},
        "no such format": {
            "serialized_named_tensors": [serialized(good)],
            "load_format": "bogus",
        },
    }


async def test_4_pickled_tensors_never_come_to_the_engine(
    http: httpx2.AsyncClient, engine: Server, models: Path
) -> None:
    """Twice each: a payload that SGLang has read is gone, and reading it again ends it."""
    before = generate(engine)
    assert await post(http, "begin_weight_update", {}) == 200
    for what, body in payloads(models).items():
        for _ in range(2):
            assert await post(http, "update_weights_from_tensor", body) >= 400, what
    adapter = {
        "lora_name": "t", "config_dict": {"peft_type": "LORA", "r": 8},
        "serialized_named_tensors": "Z2FyYmFnZQ==",
    }  # fmt: skip
    assert await post(http, "load_lora_adapter_from_tensors", adapter) >= 400
    assert await post(http, "end_weight_update", {}) == 200
    seen = engine.log.read_text(errors="replace")
    assert "POST /update_weights_from_tensor" not in seen
    assert "POST /load_lora_adapter_from_tensors" not in seen
    assert generate(engine) == before


async def test_5_a_group_without_a_name(http: httpx2.AsyncClient) -> None:
    body = {
        "master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2,
        "group_name": "", "backend": "gloo",
    }  # fmt: skip
    assert await post(http, "init_weights_update_group", body) == 400


async def test_6_a_record_that_was_not_configured(http: httpx2.AsyncClient) -> None:
    assert await post(http, "start_expert_distribution_record", {}) >= 400


async def test_7_a_profile_to_where_nothing_can_be_written(http: httpx2.AsyncClient) -> None:
    assert await post(http, "start_profile", {"output_dir": "/proc/not/here"}) == 400
    assert await post(http, "stop_profile", {}) >= 400


@pytest.mark.parametrize("mode", ["", "bogus", 7, None])
async def test_8_a_pause_of_no_known_mode(http: httpx2.AsyncClient, mode: object) -> None:
    assert await post(http, "pause_generation", {"mode": mode}) == 400


async def test_9_a_request_for_an_adapter_that_does_not_fit(
    http: httpx2.AsyncClient, models: Path
) -> None:
    """Loaded with success, it ended the server with the first request that named it."""
    folder = models / "lora-of-a-real-rank"
    shutil.copytree(models / "lora-one", folder, dirs_exist_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 8.0}))
    body = {"lora_name": "t", "lora_path": str(folder)}
    assert await post(http, "load_lora_adapter", body) == 400
