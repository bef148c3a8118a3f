"""What an engine is asked for, over real gRPC."""

from __future__ import annotations

import pytest

from tests.http.full import FULL, Full

pytestmark = pytest.mark.anyio


async def test_where_cache_events_are_to_be_had(full: Full) -> None:
    answer = await full.gate.get(f"/v1/engines/{FULL}/kv-event-sources")
    assert answer.status_code == 200
    (source,) = answer.json()["items"]
    assert (source["transport"], source["data_parallel_rank"]) == ("grpc", 0)
    assert (source["endpoint"], source["replay_endpoint"]) == (None, None)
    assert "hwm" not in source  # not given, so not 0
    without = await full.gate.get("/v1/engines/e1/kv-event-sources")  # the scripted one
    assert (without.status_code, without.json()["reason"]) == (501, "UNSUPPORTED_OPERATION")
    await full.double.kill()
    gone = await full.gate.get(f"/v1/engines/{FULL}/kv-event-sources")
    assert (gone.status_code, gone.json()["reason"]) == (503, "ENGINE_UNREACHABLE")


async def test_which_weights_are_served(full: Full) -> None:
    path = f"/v1/engines/{FULL}/weight-version"
    before = (await full.gate.get(path)).json()
    assert (before["version"], before["state"]) == ("v1", "valid")
    source = {"disk": {"path": "/models/v2"}}
    update = {"source": source, "weight_version": "v2", "cache_policy": "keep", "pause": "abort"}
    await full.does("update-weights", update)
    after = (await full.gate.get(path)).json()
    assert (after["version"], after["updates_since_flush"]) == ("v2", 1)
    assert after["observed_at"] > before["observed_at"]
