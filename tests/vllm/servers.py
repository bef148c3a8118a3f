"""Real vLLM as a process: its Python server, or its Rust front end with `vllm.Control`.

What scripts/setup-vllm has built is used; nothing is built here. Logs stay in .data/vllm/logs.
"""

from __future__ import annotations

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

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".vllm"
DATA = ROOT / ".data" / "vllm"
START_S = 240.0
MARK = "CHADBURN_TEST_SERVER"


@dataclass(frozen=True)
class Server:
    """One running engine. `url`: its HTTP; `control`: host:port of its gRPC, of Rust alone."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    control: str
    log: Path
    mark: str

    def engine_core(self) -> int:
        """The process that schedules and steps, without the front end."""
        for pid in processes(self.mark, self.process.pid):
            if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError(f"{self.name} has no EngineCore:\n{self.tail()}")

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


def environment(models: Path, version: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Nothing of the developer's own settings, and nothing that leaves the machine."""
    python = HOME / "env" / "bin" / "python"
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    overlay = {"PYTHONPATH": str(HOME / "python-0.33.0")} if version == "0.33.0" else {}
    return {
        **kept,
        **overlay,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(models),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(DATA / "cache"),
        "VLLM_CONFIG_ROOT": str(DATA / "config"),
        "VLLM_RS_PYTHON": str(python),
        "VLLM_RUST_FRONTEND_PATH": str(HOME / f"rust-{version}" / "vllm-rs"),
        "CHADBURN_VLLM_ROOTS": str(models),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(DATA / "huggingface"),
        "DO_NOT_TRACK": "1",
        **extra,
    }  # fmt: skip


@contextmanager
def serving(
    model: Path,
    *,
    rust: bool = False,
    version: str = "0.32.0",
    backend: str | None = "disk",
    arguments: Sequence[str] = (),
    extra_environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """An engine that serves `model` as `tiny`, until the block ends; then nothing of it is left.

    The model's neighbours in its folder are what it may load weights and adapters from.
    """
    port, control_port = free_ports(2)
    name = f"{'rust' if rust else 'python'}-{version}"
    log = DATA / "logs" / f"{name}-{time.strftime('%H%M%S')}-{secrets.token_hex(2)}.log"
    profiles = log.with_suffix(".profiles")
    for folder in (profiles, DATA / "cache"):
        folder.mkdir(parents=True, exist_ok=True)
    python = HOME / "env" / "bin" / "python"
    program = [str(python), "-m", "vllm.entrypoints.cli.main"]
    if rust:
        program = [str(HOME / f"rust-{version}" / "vllm-rs")]
    command = [
        *program, "serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1",
        "--port", str(port), *(["--grpc-port", str(control_port)] if rust else []),
        "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8", "--dtype", "bfloat16",
        "--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", "--profiler-config",
        f'{{"profiler":"torch","torch_profiler_dir":"{profiles}"}}',
        *(["--weight-transfer-config", f'{{"backend":"{backend}"}}'] if backend else []),
        *arguments,
    ]  # fmt: skip
    mark = secrets.token_hex(8)
    settings = environment(model.parent, version, {MARK: mark, **(extra_environment or {})})
    with log.open("wb") as output:
        output.write(f"{' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command, cwd=DATA, env=settings, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    control = f"127.0.0.1:{control_port}" if rust else ""
    server = Server(name, process, f"http://127.0.0.1:{port}", control, log, mark)
    try:
        wait_until_healthy(server)
        yield server
    finally:
        stop(server)


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
    """Ask, then kill. vLLM's front ends make process groups of their own, and an engine whose front
    end died can stay: whatever carries the server's mark in its environment is ended."""
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
    """All that belong to the server and are still there. vLLM's own processes write their names
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
    """Ports that nobody has now. vLLM takes no port 0, so another process could be quicker: it then
    says so in its log, and the test fails as not started."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
