"""Another shape of serving, over HTTP and real gRPC, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from app.domain.kinds import OperationKind
from app.enginekit.runtime import Order
from tests.enginekit.minimal_engine import fault
from tests.http.full import FULL, Full

pytestmark = pytest.mark.anyio

DECODE = {"role": "decode", "max_running_requests": 8, "drain": "wait"}
SHAPE = {
    "role": "decode",
    "tensor_parallel_size": 2,
    "data_parallel_size": 1,
    "max_running_requests": 8,
    "max_batched_tokens": 512,
}


async def test_the_result_is_the_whole_shape_and_what_is_known_follows(full: Full) -> None:
    before = (await full.gate.get(f"/v1/engines/{FULL}/info")).json()["info"]
    assert (before["role"], before["capacity"]["max_running_requests"]) == ("aggregated", 32)
    done = await full.does("reconfigure", DECODE)
    assert (done["kind"], done["state"]) == ("reconfigure_serving", "succeeded")
    assert done["verification"] == "verified"
    assert done["result"] == {"changed": True, **SHAPE}
    assert done["request"] == DECODE
    facts = await full.facts()
    assert (facts["role"], facts["admission"]) == ("decode", "open")
    # The same engine process, which is now another in what does not change otherwise.
    after = (await full.gate.get(f"/v1/engines/{FULL}/info")).json()["info"]
    assert after["instance_id"] == before["instance_id"]
    assert (after["role"], after["capacity"]["max_running_requests"]) == ("decode", 8)
    again = await full.does("reconfigure", DECODE)
    assert again["result"] == {"changed": False, **SHAPE}


async def test_what_can_not_be_seen_to_have_changed_is_unverified(full: Full) -> None:
    full.engine.stubborn = True
    done = await full.does("reconfigure", DECODE)
    assert (done["state"], done["verification"]) == ("succeeded", "unverified")


async def test_a_rank_that_fails_is_named_and_the_old_shape_stays(full: Full) -> None:
    async def fails(order: Order, rank: int) -> None:
        if order.command.kind is OperationKind.RECONFIGURE_SERVING:
            await fault(order, rank)

    full.engine.scripts["prepare", 1] = fails
    failed = await full.does("reconfigure", DECODE)
    assert (failed["state"], failed["error"]["ranks"]) == ("failed", [1])
    facts = await full.facts()
    assert (facts["role"], facts["admission"]) == ("aggregated", "open")


@pytest.mark.parametrize(
    "body",
    [
        {"drain": "wait"},
        {"role": "decode"},
        {**DECODE, "role": "unknown"},
        {**DECODE, "tensor_parallel_size": 0},
        {**DECODE, "max_running_requests": "8"},
        {**DECODE, "pipeline_parallel_size": 2},
    ],
)
async def test_senseless_orders_reach_no_engine(full: Full, body: dict[str, Any]) -> None:
    assert (await full.order("reconfigure", body)).status_code == 422
    assert full.double.rpcs["ReconfigureServing"] == 0


async def test_what_is_not_offered_is_not_asked_for(full: Full) -> None:
    for answer in (
        await full.order("reconfigure", {"data_parallel_size": 2, "drain": "wait"}),
        await full.gate.order("reconfigure", DECODE),  # the scripted one
    ):
        assert (answer.status_code, answer.json()["reason"]) == (501, "UNSUPPORTED_OPERATION")
    await full.does("release-resources", {**KV, "drain": "abort"})
    released = await full.order("reconfigure", DECODE)
    assert (released.status_code, released.json()["reason"]) == (409, "RESOURCES_RELEASED")
    assert full.double.rpcs["ReconfigureServing"] == 0


KV = {"resources": ["kv_cache"], "content": "preserve"}


async def test_a_dry_run_says_what_would_happen(full: Full) -> None:
    assert await full.effect("reconfigure", DECODE) == (
        "Closes admission and lets 0 running requests finish, then takes on role decode, "
        "max_running_requests 8, and serves again."
    )
