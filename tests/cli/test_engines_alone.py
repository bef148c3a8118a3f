"""An engine without a gateway: how it says where it is, and who asks it for text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.rpc.openengine.v1 import generation_pb2, openengine_pb2_grpc
from tests.cli.conftest import Run


class _Inference(openengine_pb2_grpc.InferenceServicer):
    """Ends at once; keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.shown.append(dict(context.invocation_metadata()))
        yield generation_pb2.GenerateResponse(
            request_id=request.request_id,
            finished=generation_pb2.GenerationFinished(reason=generation_pb2.FINISH_REASON_STOP),
        )


@pytest.fixture
def engine() -> Iterator[tuple[_Inference, str]]:
    server: Any = grpc.server(ThreadPoolExecutor(1))
    inference = _Inference()
    openengine_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield inference, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_an_engine_that_takes_no_token_is_shown_none(
    run: Run, engine: tuple[_Inference, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inference, address = engine
    monkeypatch.delenv("CHADBURN_INFERENCE_TOKEN", raising=False)
    assert run("generate", "x", "--address", address).code == 0
    assert run("generate", "x", "--address", address, "--token", "t").code == 0
    assert [one.get("authorization") for one in inference.shown] == [None, "Bearer t"]
    without = run("generate", "x")
    assert (without.code, "give --address" in without.err) == (2, True)


@pytest.mark.long
def test_an_engine_makes_the_folder_of_its_next_weights_and_says_all_its_addresses(
    tmp_path: Path,
) -> None:
    weights, ready = tmp_path / "weights", tmp_path / "ready.json"
    typed = ["engine", f"--data-dir={tmp_path / 'data'}", "--insecure-loopback"]
    typed += [f"--next-weights={weights}", f"--weights-root={weights}", f"--ready-file={ready}"]
    for name in ("inference-address", "admin-address", "vllm-control"):
        typed.append(f"--{name}=127.0.0.1:0")
    code = "from app.cli import main; main()"
    command = [sys.executable, "-c", code, *typed, "--end-with-stdin"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        process.communicate(timeout=120)
    said = json.loads(ready.read_text()) if ready.exists() else {}
    assert f"vllm.Control {said.get('vllm_control_address')}, instance" in line
    assert list(weights.iterdir())
