"""An adapter on its way: made, loaded through the gateway, used, in use, unloaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Bridge
from tests.e2e.processes import Demo, chadburn

pytestmark = pytest.mark.anyio

Run = Callable[..., subprocess.CompletedProcess[str]]
GREEDY = ("--temperature", "0", "--max-tokens", "16")


@pytest.fixture
def run(demo: Demo, bridge: Bridge) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return chadburn(*arguments, cwd=demo.folder, CHADBURN_DEMO__DIR="data")

    return run


@pytest.fixture(scope="module")
def tone(demo: Demo) -> Path:
    """As the docs say that one is made."""
    folder = demo.folder / "data" / "adapters" / "tone"
    (checkpoint,) = (demo.folder / "data" / "engine" / "models").glob("tiny-llama-*")
    subprocess.run(
        [sys.executable, "-m", "app.reference_engine.tiny_adapter", checkpoint, folder],
        check=True,
        timeout=120,
    )
    return folder


async def test_from_its_files_to_its_end(run: Run, bridge: Bridge, tone: Path) -> None:
    plain = run("generate", "the bridge rings", *GREEDY)
    unknown = run("generate", "the bridge rings", *GREEDY, "--lora", "tone")
    assert (unknown.returncode, "no adapter of that name" in unknown.stderr) == (6, True)

    loaded = run("lora", "load", "demo", "tone", "--path", str(tone), "--wait", "--json")
    assert loaded.returncode == 0, loaded.stderr
    operation = json.loads(loaded.stdout)
    assert operation["verification"] == "verified"
    assert operation["result"]["lora"] == {"id": 1, "name": "tone", "path": str(tone)}
    assert str(tone) in run("lora", "list", "demo").stdout
    engine = await bridge.gateway.get("/v1/engines/demo")
    assert [lora["name"] for lora in engine["facts"]["loras"]] == ["tone"]
    assert engine["revision"] == operation["revision"]

    toned = run("generate", "the bridge rings", *GREEDY, "--lora", "tone")
    assert toned.returncode == 0, toned.stderr
    assert toned.stdout != plain.stdout
    assert run("generate", "the bridge rings", *GREEDY).stdout == plain.stdout

    using = bridge.talk("the bridge rings", max_tokens=2000, request_id="using", lora="tone")
    await using.begun()
    busy = run("lora", "unload", "demo", "tone", "--wait", "--json")
    assert busy.returncode == 3
    error = json.loads(busy.stdout)["error"]
    assert (error["reason"], error["retryable"]) == ("LORA_IN_USE", True)
    assert error["effect"] == "none"
    assert not using.is_over
    assert run("abort", "demo", "using", "--wait").returncode == 0
    await using.over()
    gone = run("lora", "unload", "demo", "tone", "--wait")
    assert gone.returncode == 0, gone.stderr
    assert run("generate", "x", "--lora", "tone").returncode == 6
    assert run("lora", "unload", "demo", "tone").returncode == 6


async def test_one_that_can_not_be_followed(run: Run, bridge: Bridge, tone: Path) -> None:
    """The reason reaches whoever ordered it, and nothing has changed."""
    raw = json.loads((tone / "adapter_config.json").read_text())
    odd = tone.parent / "odd"
    odd.mkdir()
    (odd / "adapter_config.json").write_text(json.dumps(raw | {"use_dora": True}))
    before = await bridge.gateway.get("/v1/engines/demo")
    failed = run("lora", "load", "demo", "odd", "--path", str(odd), "--wait", "--json")
    assert failed.returncode == 3
    error = json.loads(failed.stdout)["error"]
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "ADAPTER_REFUSED")
    assert error["message"] == "use_dora: DoRA is not supported"
    outside = run("lora", "load", "demo", "out", "--path", "/etc", "--wait", "--json")
    assert "allowed root" in json.loads(outside.stdout)["error"]["message"]
    after = await bridge.gateway.get("/v1/engines/demo")
    assert (after["revision"], after["facts"]["loras"]) == (before["revision"], [])
