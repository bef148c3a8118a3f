"""Orders to an engine behind its sidecar, and what becomes of its requests: alike for every engine.

A module of an engine has a subclass `TestOrders`, and fixtures: `engine` with model `a`, `bridge`
with a gateway that knows its sidecar, `models`, `of_b`: what an engine says that was started with
`b`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.driving import Gateway
from tests.real.asking import Said, generate, streaming
from tests.real.gateway import ENGINE
from tests.real.servers import Server

PATH = f"/v1/engines/{ENGINE}"


async def resume(bridge: Gateway, paused: dict[str, Any]) -> None:
    epoch = paused["result"]["pause_epoch"]
    await bridge.does(ENGINE, "resume", {"pause_epoch": epoch})


class Orders:
    """`request_id`, `adapter`: how the engine calls the request `{}`, and what model a request
    names for the adapter `{}`."""

    request_id = "{}"
    adapter = "{}"

    async def test_paused_and_going_on(self, bridge: Gateway, engine: Server) -> None:
        with streaming(engine) as stream:
            paused = await bridge.does(ENGINE, "pause", {"mode": "keep"})
            assert not stream.ended.is_set()
            drain = await bridge.accepted(ENGINE, "pause", {"mode": "drain"})
            refused = await bridge.ended(drain["id"])
            assert refused["error"]["reason"] == "REQUESTS_FROZEN", refused
            assert not stream.ended.is_set()
            await resume(bridge, paused)
        assert (stream.finish, stream.error) == ("length", None)

    async def test_drained(self, bridge: Gateway, engine: Server) -> None:
        with streaming(engine, max_tokens=900) as stream:
            paused = await bridge.does(ENGINE, "pause", {"mode": "drain"})
            assert stream.ended.wait(60)
        assert stream.finish == "length"
        await resume(bridge, paused)

    @pytest.mark.parametrize("name", ["b", "b-sharded"])
    async def test_new_weights(
        self, bridge: Gateway, engine: Server, models: Path, of_b: Said, name: str
    ) -> None:
        of_a = generate(engine)
        for path, said in ((models / name, of_b), (models / "a", of_a)):
            ended = await bridge.does(
                ENGINE,
                "update-weights",
                {
                    "source": {"disk": {"path": str(path)}},
                    "weight_version": f"from-{path.name}",
                    "cache_policy": "flush",
                    "pause": {"mode": "keep"},
                },
            )
            assert ended["result"]["weight_version"] == f"from-{path.name}"
            assert generate(engine) == said
        assert (await bridge.get(PATH))["facts"]["admission"] == "open"

    async def test_weights_that_do_not_fit_touch_nothing(
        self, bridge: Gateway, engine: Server, models: Path
    ) -> None:
        before = generate(engine)
        for name in ("b-without-one", "b-other-shape"):
            order = await bridge.order(
                ENGINE,
                "update-weights",
                {
                    "source": {"disk": {"path": str(models / name)}},
                    "weight_version": "never",
                    "cache_policy": "flush",
                    "pause": {"mode": "keep"},
                },
            )
            assert order.status_code == 202, order.text
            ended = await bridge.ended(order.json()["id"])
            assert ended["state"] == "failed", ended
            assert ended["error"]["effect"] == "none", ended
        assert generate(engine) == before
        assert (await bridge.get(PATH))["facts"]["weights"]["version"] != "never"

    async def test_an_adapter(self, bridge: Gateway, engine: Server, models: Path) -> None:
        base = generate(engine)
        await bridge.does(ENGINE, "loras", {"name": "one", "path": str(models / "lora-one")})
        assert generate(engine, model=self.adapter.format("one")) != base
        gone = await bridge.client.delete(f"{PATH}/loras/one", headers={"idempotency-key": "gone"})
        assert (await bridge.ended(gone.json()["id"]))["state"] == "succeeded"

    async def test_requests_are_aborted(self, bridge: Gateway, engine: Server) -> None:
        with (
            streaming(engine, request_id="one") as one,
            streaming(engine, request_id="two") as two,
        ):
            ended = await bridge.does(
                ENGINE, "abort-requests", {"request_ids": [self.request_id.format("one")]}
            )
            assert ended["done"]
            assert one.ended.wait(60)
            assert not two.ended.is_set()
            await bridge.does(ENGINE, "abort-requests", {"all": True})
            assert two.ended.wait(60)
        assert (one.finish, two.finish) == ("abort", "abort")

    async def test_a_profile_and_its_file(self, bridge: Gateway, engine: Server) -> None:
        """An engine writes its trace for a minute and more, and does nothing else meanwhile."""
        started = await bridge.accepted(ENGINE, "profiles", {"profiler": "torch", "steps": 2})
        path = f"/v1/operations/{started['id']}"
        await bridge.until(
            path, lambda found: (found["progress"] or {}).get("phase") == "recording"
        )
        generate(engine, max_tokens=8)
        ended = await bridge.until(path, lambda found: found["done"], within_s=600)
        assert ended["state"] == "succeeded", ended
        assert ended["result"]["artifacts"]

    async def test_the_engine_is_killed_under_an_order(
        self, bridge: Gateway, engine: Server
    ) -> None:
        """Last, since there is no way back from here."""
        with streaming(engine):
            drain = await bridge.accepted(ENGINE, "pause", {"mode": "drain"})
            path = f"/v1/operations/{drain['id']}"
            await bridge.until(path, lambda found: found["state"] == "running")
            os.kill(engine.engine_core(), signal.SIGKILL)
            ended = await bridge.until(
                path, lambda found: found["done"] or found["state"] == "reconciling"
            )
            assert ended["state"] in ("failed", "reconciling"), ended
        await bridge.until(PATH, lambda found: found["health"]["state"] != "serving")
