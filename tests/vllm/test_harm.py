"""What harms a real vLLM when it is told so directly, told through Chadburn instead: the engine
generates afterwards, and what was said of the order is true.

The numbers are rows of the table in docs/vllm.md. Each test that names one sends the order which
vLLM takes; that vLLM itself comes to grief by them was recorded, and is not repeated here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.driving import Gateway
from tests.real.asking import generate, streaming
from tests.real.gateway import ENGINE, gateway, register
from tests.real.servers import Server

pytestmark = pytest.mark.anyio

PATH = f"/v1/engines/{ENGINE}"
LAYER = f"""
[[compat]]
layer = "vllm"
engines = ["{ENGINE}"]
flavour = "0.32"
"""


@pytest.fixture(scope="module")
async def bridge(
    rust_engine: Server, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway"), LAYER) as serving:
        async with serving.client:
            await register(serving, rust_engine.control, "vllm")
            yield serving


async def call(bridge: Gateway, method: str, path: str, body: Any = None) -> httpx2.Response:
    """One of vLLM's own calls, to the layer in front of the engine."""
    sent = {} if body is None else {"json": body}
    return await bridge.client.request(method, f"/compat/vllm/{ENGINE}{path}", **sent)


async def post(bridge: Gateway, path: str, body: Any = None) -> tuple[int, Any]:
    answer = await call(bridge, "POST", path, body)
    return answer.status_code, answer.json() if answer.content else None


async def paused(bridge: Gateway) -> Any:
    return (await call(bridge, "GET", "/is_paused")).json()["is_paused"]


async def test_1_no_method_of_a_callers_choice(bridge: Gateway, rust_engine: Server) -> None:
    status, told = await post(bridge, "/collective_rpc", {"method": "list_loras", "timeout": 0})
    assert (status, "error" in told) == (403, True)
    assert rust_engine.is_alive()


async def test_2_no_update_starts_under_traffic(bridge: Gateway, rust_engine: Server) -> None:
    with streaming(rust_engine) as stream:
        status, told = await post(bridge, "/start_weight_update")
        assert (status, "error" in told) == (409, True)
    assert (stream.finish, stream.error) == ("length", None)
    assert rust_engine.is_alive()


async def test_3_a_resume_behind_a_failed_update(
    bridge: Gateway, rust_engine: Server, models: Path
) -> None:
    before = generate(rust_engine)
    assert await post(bridge, "/pause?mode=keep") == (200, {"status": "paused"})
    await post(bridge, "/init_weight_transfer_engine", {"init_info": {}})
    status, _ = await post(bridge, "/start_weight_update")
    assert status == 200
    status, told = await post(
        bridge, "/update_weights", {"update_info": {"path": str(models / "b-without-one")}}
    )
    assert status >= 400, told
    # Whatever the plugin says, an update that had begun and failed leaves doubt: no resume.
    status, told = await post(bridge, "/resume")
    assert (status, "error" in told) == (409, True)
    facts = (await bridge.get(PATH))["facts"]
    assert facts["weights"]["state"] == "inconsistent"
    # The way back: a full update that succeeds.
    assert (await post(bridge, "/start_weight_update"))[0] == 200
    good = {"update_info": {"path": str(models / "a")}}
    assert (await post(bridge, "/update_weights", good))[0] == 200
    assert (await post(bridge, "/finish_weight_update", {"weight_version": "a2"}))[0] == 200
    assert await post(bridge, "/resume") == (200, {"status": "resumed"})
    assert generate(rust_engine) == before


async def test_5_no_drain_of_what_is_frozen(bridge: Gateway, rust_engine: Server) -> None:
    with streaming(rust_engine) as stream:
        assert (await post(bridge, "/pause?mode=keep"))[0] == 200
        status, told = await post(bridge, "/pause?mode=wait")
        assert (status, "error" in told) == (409, True)
        assert not stream.ended.is_set()
        assert (await post(bridge, "/resume"))[0] == 200
    assert stream.finish == "length"


async def test_8_and_9_asleep_is_not_offered_where_it_can_not_be(bridge: Gateway) -> None:
    """On a CPU vLLM's gRPC refuses to sleep, though its HTTP pretends to: no such endpoints."""
    for path in ("/sleep", "/wake_up", "/release_kv_cache_memory"):
        assert (await post(bridge, path))[0] == 404


async def test_11_bodies_that_vllm_ignores(bridge: Gateway, rust_engine: Server) -> None:
    with streaming(rust_engine) as stream:
        status, _ = await post(bridge, "/pause", {"mode": "keep"})
        assert status == 400
        assert await paused(bridge) is False
    assert stream.finish == "length"


async def test_12_aborts_count_what_ended(bridge: Gateway, rust_engine: Server) -> None:
    for ids in ("cmpl-abc", 5, True, [1, 2]):
        status, _ = await post(bridge, "/abort_requests", {"request_ids": ids})
        assert status == 400, ids
    status, told = await post(bridge, "/abort_requests", {"request_ids": ["nobody"]})
    assert (status, told) == (200, {"status": "aborted", "aborted": 0, "unverified": 1})
    with streaming(rust_engine, request_id="one") as stream:
        status, told = await post(bridge, "/abort_requests", {"request_ids": ["chatcmpl-one"]})
        assert (status, told["unverified"]) == (200, 1)
        assert stream.ended.wait(60)
    assert stream.finish == "abort"
    # All of them: this service can't, so it is not claimed.
    assert (await post(bridge, "/abort_requests", {}))[0] == 501


async def test_17_everything_wants_a_credential(bridge: Gateway) -> None:
    async with httpx2.AsyncClient(base_url=bridge.url) as stranger:
        for path in ("pause", "scale_elastic_ep", "collective_rpc", "v1/load_lora_adapter"):
            answer = await stranger.post(f"/compat/vllm/{ENGINE}/{path}")
            assert answer.status_code in (401, 404), path
        assert (await stranger.post(f"{PATH}/pause", json={"mode": "abort"})).status_code == 401
    assert await paused(bridge) is False


async def test_the_engine_generates_after_all_of_it(rust_engine: Server) -> None:
    assert rust_engine.is_alive()
