"""An engine's server as a process: started, waited for, and gone with all its children."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0
# An engine's start takes up to a minute on two cores, and some tests start several.
TEST_S = 900
MARK = "CHADBURN_TEST_SERVER"


@dataclass(frozen=True)
class Server:
    """One running engine. `engine`: as `chadburn sidecar` calls it; `scheduler`: what the command
    line of the process has that schedules and steps; `url`: its HTTP; `control`: host:port of its
    gRPC, where it has any."""

    name: str
    engine: str
    scheduler: bytes
    process: subprocess.Popen[bytes]
    url: str
    control: str
    log: Path
    mark: str

    def engine_core(self) -> int:
        """The process that schedules and steps, without the front end."""
        for pid in processes(self.mark, self.process.pid):
            if self.scheduler in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError(f"{self.name} has no process {self.scheduler!r}:\n{self.tail()}")

    def is_alive(self) -> bool:
        """Whether it still generates; what /health says is no proof of that."""
        if self.process.poll() is not None:
            return False
        body = {"model": "tiny", "prompt": "stand by", "max_tokens": 2, "temperature": 0}
        try:
            answer = httpx2.post(f"{self.url}/v1/completions", json=body, timeout=60)
        except httpx2.HTTPError:
            return False
        return answer.status_code == 200

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def give_time(items: list[pytest.Item], room: Path) -> None:
    """To all tests in that folder, more than others get."""
    for item in items:
        if item.path.is_relative_to(room):
            item.add_marker(pytest.mark.timeout(TEST_S))


def own_variables() -> dict[str, str]:
    """What an engine has of this process's environment: nothing of the developer's own settings."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


@contextmanager
def running(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    name: str,
    engine: str,
    scheduler: bytes,
    port: int,
    control: str = "",
) -> Iterator[Server]:
    """Healthy when the block begins; when it ends, nothing of it is left."""
    mark = secrets.token_hex(8)
    with log.open("wb") as output:
        output.write(f"{' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command, cwd=log.parent, env={**environment, MARK: mark}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    server = Server(name, engine, scheduler, process, url, control, log, mark)
    try:
        wait_until_healthy(server)
        yield server
    finally:
        stop(server)


def made_models(python: Path, data: Path) -> Path:
    """The folder with the models `a`, `b` and what is wrong with others; made once, by the engine's
    own interpreter."""
    script = Path(__file__).with_name("models.py")
    folder = data / f"models-{hashlib.sha256(script.read_bytes()).hexdigest()[:12]}"
    if not folder.exists():
        subprocess.run([python, script, folder], check=True, stdin=subprocess.DEVNULL)
    return folder


def new_log(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}-{time.strftime('%H%M%S')}-{secrets.token_hex(2)}.log"


def wait_until_healthy(server: Server) -> None:
    """Raises: AssertionError with the log's end, when it died or took longer than START_S."""
    ends = time.monotonic() + START_S
    with httpx2.Client(base_url=server.url, timeout=5) as http:
        while not is_healthy(http):
            assert server.process.poll() is None, (
                f"{server.name} did not start:\n{server.tail(400)}"
            )
            assert time.monotonic() < ends, (
                f"{server.name} was not healthy in time:\n{server.tail()}"
            )
            time.sleep(0.25)


def is_healthy(http: httpx2.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx2.HTTPError:
        return False


def stop(server: Server) -> None:
    """Ask, then kill. Front ends make process groups of their own, and an engine whose front end
    died can stay: whatever carries the server's mark in its environment is ended."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        try:
            server.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
    while pids := processes(server.mark, server.process.pid):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def processes(mark: str, session: int) -> list[int]:
    """All that belong to the server and are still there. Engines' processes write their names
    over their environment, so they are told by their session; what makes a session of its own, by
    the mark that it inherited."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            marked = wanted in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if state != "Z" and (marked or int(its_session) == session):
            found.append(int(entry.name))
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now. Engines take no port 0, so another process could be quicker: it
    then says so in its log, and the test fails as not started."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
