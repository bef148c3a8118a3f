"""A gateway and the sidecar before a worker of Dynamo's own runtime, as processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.dynamo.conftest import PATH, Bridge
from tests.dynamo.servers import DATA, asking, serving, tokens_of
from tests.e2e.processes import COMMAND, environment
from tests.enginekit.client import until
from tests.real.beside import beside
from tests.real.gateway import ENGINE
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.dynamo.test_conformance import OPENS_ITSELF

pytestmark = pytest.mark.anyio


async def test_paused_in_each_mode_and_going_on(bridge: Bridge) -> None:
    worker = bridge.worker
    with asking(worker, 300) as request:
        paused = await bridge.does("pause", {"mode": "keep"})
        assert (await bridge.facts())["admission"] == "paused"
        assert paused["result"]["requests_kept"] == 1
        assert worker.state()["state"] == "all"
        await bridge.resumed()
        await bridge.does("pause", {"mode": "drain"})
        assert tokens_of(request) == 300
    assert worker.state()["state"] == "new"
    await bridge.resumed()
    with asking(worker, 100_000) as request:
        await bridge.does("pause", {"mode": "abort"})
        assert tokens_of(request) < 100_000
    await bridge.resumed()
    assert worker.state()["state"] == "open"


async def test_an_error_under_status_200_is_a_failed_operation(bridge: Bridge) -> None:
    with asking(bridge.worker, 100_000, lora="a") as request:
        asked = await bridge.gateway.accepted(ENGINE, "pause", {"mode": "keep"})
        ended = await bridge.gateway.ended(asked["id"])
        assert ended["state"] == "failed"
        assert ended["error"]["reason"] == "ENGINE_REFUSED"
        assert (await bridge.facts())["admission"] == "open"
        await bridge.does("pause", {"mode": "abort"})
        assert tokens_of(request) < 100_000
    await bridge.resumed()


async def test_a_cache_is_emptied_when_nobody_uses_it(bridge: Bridge) -> None:
    """The worker says that it is either way."""
    with asking(bridge.worker, 100_000, request_id="a") as request:
        asked = await bridge.gateway.accepted(ENGINE, "flush-caches", {"caches": ["prefix"]})
        ended = await bridge.gateway.ended(asked["id"])
        assert (ended["state"], ended["error"]["reason"]) == ("failed", "CACHE_IN_USE")
        aborted = await bridge.does("abort-requests", {"request_ids": ["a"]})
        assert aborted["verification"] == "unverified"
        assert tokens_of(request) < 100_000
    await bridge.does("flush-caches", {"caches": ["prefix"]})
    assert bridge.worker.state()["flushed"] == 1


async def test_asleep_it_is_out_of_discovery(bridge: Bridge) -> None:
    worker = bridge.worker
    body = {"resources": ["weights"], "content": "preserve", "drain": "wait"}
    released = await bridge.does("release-resources", body)
    assert worker.state()["level"] == 1
    assert {one["reason"] for one in released["warnings"]} >= {"WORKER_UNROUTED"}
    assert not worker.state()["routed"]
    epoch = released["result"]["release_epoch"]
    await bridge.does("restore-resources", {"resources": ["weights"], "release_epoch": epoch})
    assert worker.state()["level"] == 0
    assert worker.state()["state"] == "all"
    await bridge.resumed()
    with asking(worker, 200) as request:
        assert tokens_of(request) == 200


async def test_weights_from_disk(bridge: Bridge) -> None:
    worker, new = bridge.worker, bridge.files / "b"
    body = {
        "source": {"disk": {"path": str(new)}}, "weight_version": "v2", "pause": "keep",
    }  # fmt: skip
    updated = await bridge.does("update-weights", body)
    assert updated["verification"] == "unverified"
    assert (await bridge.facts())["weights"]["version"] == "v2"
    assert worker.state()["version"] == "v2"
    worker.call("test/arrange", {"update_error": "out of memory"})
    asked = await bridge.gateway.accepted(ENGINE, "update-weights", {**body, "weight_version": "3"})
    ended = await bridge.gateway.ended(asked["id"])
    worker.call("test/arrange", {"update_error": None})
    assert (ended["state"], ended["error"]["reason"]) == ("failed", "ENGINE_REFUSED")
    await bridge.gateway.until(
        PATH, lambda found: found["facts"]["weights"]["state"] == "inconsistent"
    )
    epoch = (await bridge.facts())["pause"]["epoch"]
    refused = await bridge.gateway.order(ENGINE, "resume", {"pause_epoch": epoch})
    assert refused.status_code == 409
    under = {"under_pause": {"pause_epoch": epoch}, "weight_version": "v4"}
    await bridge.does("update-weights", {"source": body["source"], **under})
    await bridge.resumed()


async def test_adapters(bridge: Bridge) -> None:
    loaded = await bridge.does("loras", {"name": "one", "path": str(bridge.files / "lora")})
    assert loaded["result"]["changed"]
    await bridge.gateway.until(
        PATH, lambda found: [one["name"] for one in found["facts"]["loras"]] == ["one"]
    )
    deleted = await bridge.gateway.client.delete(
        f"{PATH}/loras/one", headers={"idempotency-key": "gone"}
    )
    assert deleted.status_code == 202
    await bridge.gateway.ended(deleted.json()["id"])
    await bridge.gateway.until(PATH, lambda found: not found["facts"]["loras"])


async def test_a_worker_that_is_started_anew_is_another_instance(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "files" / "a", 1)
    with serving("vllm") as first:
        port = int(first.url.rpartition(":")[2])
        with beside(first, tmp_path, model.parent) as sidecar:
            before = json.loads((tmp_path / "sidecar.json").read_text())["instance_id"]
            first.process.kill()
            first.process.wait()
            with serving("vllm", port=port):
                said = json.loads((tmp_path / "sidecar.json").read_text())

                def another() -> bool:
                    said.update(json.loads((tmp_path / "sidecar.json").read_text()))
                    return bool(said["instance_id"] != before)

                await until(another, 60)
                assert said["admin_address"] == sidecar.admin


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["vllm", "vllm-sidecar", "sglang", "trtllm"])
def test_conformance(tmp_path: Path, kind: str) -> None:
    """The report lies in .data/dynamo, with what could not be tried and why."""
    root = tmp_path / "files"
    model, new = checkpoint(root / "a", 1), checkpoint(root / "b", 2)
    for below in ("scratch", "lora"):
        (root / below).mkdir()
    with (
        serving(kind) as worker,
        beside(worker, tmp_path, root, f"--worker={kind}", f"--model-path={model}") as sidecar,
    ):
        done = subprocess.run(
            [
                *COMMAND, "conformance", sidecar.admin, "--destructive", f"--weights={new}",
                f"--lora={root / 'lora'}", f"--scratch={root / 'scratch'}", "--json",
            ],
            env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        (DATA / f"conformance-{kind}.json").write_text(done.stdout)
        told = json.loads(done.stdout)
        failed = {case["id"]: case for case in told["cases"] if case["verdict"] == "fail"}
        assert set(failed) == (OPENS_ITSELF if kind == "trtllm" else set()), failed
        assert not told["left_behind"], done.stderr
        assert worker.process.poll() is None
