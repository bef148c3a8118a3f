"""Edges of the main path: cancelling, limits of waiting, and what no token may do."""

from __future__ import annotations

import time

import grpc
import pytest

from app.inference_client import GenerationRefused
from tests.e2e.conftest import Bridge
from tests.e2e.driving import Gateway, admin, talk

pytestmark = pytest.mark.anyio


class TestCancel:
    async def test_a_cancelled_drain_opens_admission_again(self, bridge: Bridge) -> None:
        running = await bridge.talk("the bridge rings", max_tokens=1500).begun()
        drain = await bridge.accepted("pause", {"mode": "drain"})
        path = f"/v1/operations/{drain['id']}"
        await bridge.gateway.until(
            path, lambda found: (found["progress"] or {}).get("phase") == "draining"
        )
        held = bridge.talk("full ahead", max_tokens=5)
        cancelled = await bridge.gateway.client.post(f"{path}/cancel", json={})
        assert cancelled.status_code in {200, 202}, cancelled.text
        ended = await bridge.gateway.ended(drain["id"])
        assert ended["state"] == "cancelled"
        assert not running.is_over  # it was not the drain that ended
        assert (await held.over()).finished is not None
        again = await bridge.gateway.client.post(f"{path}/cancel", json={})
        assert (again.status_code, again.json()["reason"]) == (409, "OPERATION_ENDED")
        await bridge.does("abort-requests", {"all": True})
        await running.over()

    async def test_while_one_runs_another_is_refused_and_told_which(self, bridge: Bridge) -> None:
        running = await bridge.talk("the bridge rings", max_tokens=1500).begun()
        drain = await bridge.accepted("pause", {"mode": "drain"})
        busy = await bridge.order("flush-caches", {"caches": ["prefix"]})
        assert (busy.status_code, busy.json()["reason"]) == (409, "ENGINE_BUSY")
        assert busy.json()["operation"] == drain["id"]
        assert busy.json()["retryable"] is True
        # Aborting is not exclusive, and it is what lets the drain come to its end.
        aborted = await bridge.does("abort-requests", {"all": True})
        assert aborted["result"]["changed"] is True
        assert (await bridge.gateway.ended(drain["id"]))["state"] == "succeeded"
        await running.over()


class TestNothingHangsForEver:
    async def test_a_request_is_held_no_longer_than_was_said(self, bridge: Bridge) -> None:
        await bridge.does("pause", {"mode": "drain", "hold_limit_ms": 300})
        begun = time.monotonic()
        held = await bridge.talk("full ahead", max_tokens=5).over()
        assert isinstance(held.error, GenerationRefused)
        assert held.error.retryable
        assert 0.3 <= time.monotonic() - begun < 30

    async def test_an_order_ends_at_its_deadline(self, bridge: Bridge) -> None:
        running = await bridge.talk("the bridge rings", max_tokens=1500).begun()
        drain = await bridge.accepted("pause", {"mode": "drain", "deadline_ms": 1500})
        ended = await bridge.gateway.ended(drain["id"])
        assert ended["state"] == "failed"
        assert ended["error"]["code"] == "DEADLINE_EXCEEDED"
        await bridge.gateway.open_again(bridge.engine)  # a drain that fails leaves it open
        await bridge.does("abort-requests", {"all": True})
        await running.over()


class TestTokens:
    async def test_the_gateway_knows_its_own_from_the_engines_two(self, bridge: Bridge) -> None:
        tokens = bridge.ready["tokens"]
        expected = {"inference": (403, "INSUFFICIENT_SCOPE"), "reader": (403, "INSUFFICIENT_SCOPE")}
        for role, (status, reason) in expected.items():
            caller = Gateway(bridge.gateway.url, tokens[role])
            async with caller.client:
                answer = await caller.order(bridge.engine, "pause", {"mode": "drain"})
            assert (answer.status_code, answer.json()["reason"]) == (status, reason)
        foreign = Gateway(bridge.gateway.url, tokens["engine"])
        async with foreign.client:
            answer = await foreign.client.get("/v1/engines")
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")

    @pytest.mark.parametrize("role", ["operator", "reader", "inference"])
    async def test_the_engine_takes_orders_from_nobody_else(
        self, bridge: Bridge, role: str
    ) -> None:
        refusals = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
        async with admin(bridge.ready["admin_address"], bridge.ready["tokens"][role]) as engine:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await engine.profile()
        assert refused.value.code() in refusals

    @pytest.mark.parametrize("role", ["operator", "engine"])
    async def test_an_administrator_does_not_infer(self, bridge: Bridge, role: str) -> None:
        token = bridge.ready["tokens"][role]
        said = await talk(bridge.ready["inference_address"], token, "hello", max_tokens=1).over()
        assert isinstance(said.error, GenerationRefused)
        assert said.error.reason in {"UNAUTHENTICATED", "PERMISSION_DENIED"}

    async def test_refused_callers_are_in_the_book(self, bridge: Bridge) -> None:
        caller = Gateway(bridge.gateway.url, bridge.ready["tokens"]["reader"])
        async with caller.client:
            await caller.order(bridge.engine, "pause", {"mode": "drain"})
        found = await bridge.gateway.get("/v1/audit?principal=reader&page_size=1")
        (entry,) = found["items"]
        assert (entry["outcome"], entry["reason"]) == ("denied", "INSUFFICIENT_SCOPE")
        assert entry["source"] == "127.0.0.1"
