"""The reference engine's `vllm.Control`, ordered by a gateway in dialect `vllm`: what vLLM refuses
to do on a CPU, sleep above all, done by an engine that really gives memory back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.driving import Gateway
from tests.e2e.processes import Process, cleaned
from tests.real.gateway import ENGINE, gateway, register

pytestmark = [pytest.mark.anyio, pytest.mark.long]

PATH = f"/v1/engines/{ENGINE}"
MEMORY = ["weights", "kv_cache"]


async def facts(bridge: Gateway) -> dict[str, Any]:
    await bridge.get(f"{PATH}/info")
    return dict((await bridge.get(PATH))["facts"])


async def resume(bridge: Gateway) -> None:
    epoch = (await facts(bridge))["pause"]["epoch"]
    await bridge.does(ENGINE, "resume", {"pause_epoch": epoch})
    assert (await facts(bridge))["admission"] == "open"


async def test_paused_asleep_and_with_new_weights(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    engine = Process(
        "engine",
        [
            "engine",
            f"--data-dir={tmp_path / 'engine'}",
            "--insecure-loopback",
            "--inference-address=127.0.0.1:0",
            "--admin-address=127.0.0.1:0",
            "--vllm-control=127.0.0.1:0",
            f"--next-weights={weights}",
            f"--weights-root={weights}",
            f"--ready-file={tmp_path / 'engine.json'}",
        ],
        tmp_path / "engine.log",
        tmp_path,
    )
    with cleaned(engine), gateway(tmp_path) as bridge:
        engine.start()
        ready = engine.ready(tmp_path / "engine.json")
        async with bridge.client:
            await register(bridge, ready["vllm_control_address"], "vllm")
            await bridge.does(ENGINE, "pause", {"mode": "drain"})
            await resume(bridge)
            released = await bridge.does(
                ENGINE,
                "release-resources",
                {"resources": MEMORY, "content": "preserve", "drain": "abort"},
            )
            epoch = released["result"]["release_epoch"]
            assert set((await facts(bridge))["released"]) == set(MEMORY)
            await bridge.does(
                ENGINE, "restore-resources", {"resources": MEMORY, "release_epoch": epoch}
            )
            await resume(bridge)
            await bridge.does(
                ENGINE,
                "update-weights",
                {
                    "source": {"disk": {"path": ready["next_weights"]}},
                    "weight_version": "v2",
                    "cache_policy": "keep",
                    "pause": {"mode": "keep"},
                },
            )
            found = await facts(bridge)
            assert found["weights"]["version"] == "v2"
            assert (found["weights"]["state"], found["admission"]) == ("valid", "open")
