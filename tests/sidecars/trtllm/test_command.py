"""`chadburn sidecar trtllm`, up to where it would serve; and as a process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import grpc
import pytest

from app.cli import app
from app.commands.ending import CommandFailed
from app.rpc.openengine.v1 import admin_pb2, admin_pb2_grpc
from tests.doubles.trtllm_http import KEY, running_trtllm
from tests.enginekit.client import until

ROOT = Path(__file__).parents[3]


def _refusal(folder: Path, *words: str) -> str:
    base = ("sidecar", "trtllm", "--url", "http://127.0.0.1:1", "--data-dir", str(folder / "d"))
    with pytest.raises(CommandFailed) as failed:
        app([*base, "--insecure-loopback", *words], standalone_mode=False)
    assert failed.value.exit == 2
    return failed.value.line


def test_options_that_it_has_no_use_for_are_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("short")
    assert "16" in _refusal(tmp_path, "--control-key-file", str(key))
    assert "--control-scheme" in _refusal(tmp_path, "--control-scheme", "none")
    for tag in ("kv_cache", "weights"):
        assert f"{tag} is no tag" in _refusal(tmp_path, "--weights-tag", tag)
    assert "--lora-root" in _refusal(tmp_path, "--lora-root", str(tmp_path))
    key.write_text(KEY)
    native = ("--url", "grpc://127.0.0.1:1")
    assert "http://" in _refusal(tmp_path, *native, "--control-key-file", str(key))
    assert "--url is" in _refusal(tmp_path, "--url", "ftp://127.0.0.1:1")


@pytest.mark.anyio
@pytest.mark.long
async def test_as_a_process(tmp_path: Path) -> None:
    ready, key = tmp_path / "ready", tmp_path / "key"
    key.write_text(KEY + "\n")
    async with running_trtllm() as trtllm:
        words = ("sidecar", "trtllm", "--url", trtllm.url, "--data-dir", str(tmp_path / "data"))
        options = ("--admin-address", "127.0.0.1:0", "--inference-address", "127.0.0.1:0")
        tags = ("--weights-tag", "model_weights", "--weights-tag", "draft_model_weights")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app.cli", *words, *options, *tags, "--insecure-loopback"),
            *("--control-key-file", str(key), "--ready-file", str(ready), "--only-way-in"),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            await until(ready.exists, 60)
            said = json.loads(ready.read_text())
            assert said["engine"] == "trtllm 1.3.0rc1"
            async with grpc.aio.insecure_channel(said["admin_address"]) as channel:
                stub = admin_pb2_grpc.OpenEngineAdminStub(channel)
                request = admin_pb2.ReleaseResourcesRequest(
                    idempotency_key="k",
                    resources=[admin_pb2.RESOURCE_KIND_WEIGHTS],
                    content=admin_pb2.CONTENT_POLICY_PRESERVE,
                    drain=admin_pb2.DRAIN_RULE_WAIT,
                )
                events = [event async for event in stub.ReleaseResources(request, timeout=30)]
                assert events[-1].HasField("completed")
            assert trtllm.memory.parked == ["draft_model_weights", "model_weights"]
        finally:
            process.terminate()
            assert await process.wait() == 0
