"""Real vLLM as a process: its Python server, or its Rust front end with `vllm.Control`.

What scripts/setup-vllm has built is used; nothing is built here. Logs stay in .data/vllm/logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tests.real.servers import ROOT, Server, free_ports, new_log, own_variables, running

HOME = ROOT / ".vllm"
DATA = ROOT / ".data" / "vllm"


def environment(models: Path, version: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Nothing of the developer's own settings, and nothing that leaves the machine."""
    python = HOME / "env" / "bin" / "python"
    overlay = {"PYTHONPATH": str(HOME / "python-0.33.0")} if version == "0.33.0" else {}
    return {
        **own_variables(),
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
    log = new_log(DATA / "logs", name)
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
        "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "8", "--dtype", "bfloat16",
        "--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", "--profiler-config",
        f'{{"profiler":"torch","torch_profiler_dir":"{profiles}"}}',
        *(["--weight-transfer-config", f'{{"backend":"{backend}"}}'] if backend else []),
        *arguments,
    ]  # fmt: skip
    settings = environment(model.parent, version, extra_environment or {})
    with running(
        command, settings, log, name=name, engine="vllm", scheduler=b"EngineCore", port=port,
        control=f"127.0.0.1:{control_port}" if rust else "",
    ) as server:  # fmt: skip
        warm_up(server)
        yield server


def warm_up(server: Server) -> None:
    """On a CPU with AMX vLLM's attention uses tiles that nobody has asked the kernel for: its
    worker dies of a first prompt of 4 tokens, and of none behind a long one, whose products of
    matrices make oneDNN ask."""
    body = {"model": "tiny", "prompt": list(range(5, 69)), "max_tokens": 1, "temperature": 0}
    httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
