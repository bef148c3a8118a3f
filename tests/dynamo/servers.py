"""Dynamo's runtime as a process, with the double's worker behind it, and requests to it.

What scripts/setup-dynamo has built is used; nothing is built here. Logs stay in .data/dynamo/logs.
It listens on loopback alone, and needs no etcd and no NATS: workers find one another by files.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.real.servers import MARK, ROOT, Server, new_log, own_variables, stop

HOME = ROOT / ".dynamo"
PYTHON = HOME / "env" / "bin" / "python"
DATA = ROOT / ".data" / "dynamo"
START_S = 60.0


@dataclass(frozen=True)
class DynamoServer(Server):
    environment: dict[str, str] = field(default_factory=dict)

    def call(self, path: str, body: Any = None) -> Any:
        """A callback, by the runtime's own HTTP."""
        answer = httpx2.post(f"{self.url}/engine/{path}", json=body or {}, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def state(self) -> Any:
        return self.call("test/state")

    def orders(self, *routes: str) -> list[Any]:
        reads = ("liveness_probe", "get_weight_version", "is_paused")
        calls = [call for call in self.state()["calls"] if not call[0].endswith(reads)]
        return [call for call in calls if not routes or call[0] in routes]


@contextmanager
def serving(kind: str, *, port: int | None = None) -> Iterator[DynamoServer]:
    """A worker of that kind, until the block ends; then nothing of it is left."""
    port = port or free_port()
    log = new_log(DATA / "logs", kind)
    store = DATA / "stores" / log.stem
    store.mkdir(parents=True)
    mark = secrets.token_hex(8)
    environment = {
        **own_variables(),
        MARK: mark,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "DYN_FILE_KV": str(store),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_LORA_ENABLED": "true",
        "DYN_LORA_PATH": str(store / "loras"),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(PYTHON), str(ROOT / "tests" / "dynamo" / "worker.py"), kind],
            env={**environment, "DYN_SYSTEM_PORT": str(port)},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    server = DynamoServer(
        name=f"dynamo-{kind}", engine="dynamo", scheduler=b"worker.py", process=process,
        url=f"http://127.0.0.1:{port}", control="", log=log, mark=mark, environment=environment,
    )  # fmt: skip
    try:
        _wait(server)
        yield server
    finally:
        stop(server)
        shutil.rmtree(store, ignore_errors=True)


def _wait(server: DynamoServer) -> None:
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at:
        assert server.process.poll() is None, server.tail()
        try:
            if "inflight_requests{" in httpx2.get(f"{server.url}/metrics", timeout=5).text:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the worker does not come up:\n{server.tail()}")


@contextmanager
def asking(server: DynamoServer, tokens: int, **request: Any) -> Iterator[subprocess.Popen[str]]:
    """A request by Dynamo's own plane, in flight; see `tokens_of`."""
    before = server.state()["requests"]
    words = [str(PYTHON), str(ROOT / "tests" / "dynamo" / "asker.py"), str(tokens)]
    words += [f"{name}={value}" for name, value in request.items()]
    with subprocess.Popen(
        words, env=server.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            gives_up_at = time.monotonic() + START_S
            while server.state()["requests"] <= before:
                assert process.poll() is None, "the request has ended already"
                assert time.monotonic() < gives_up_at, "the request does not come"
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def tokens_of(process: subprocess.Popen[str]) -> int:
    """How many it got, once it has ended."""
    said, _ = process.communicate(timeout=START_S)
    return int(said.split()[-1])


def free_port() -> int:
    """Below what the kernel hands out by itself: the runtime takes no port above 32767."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
