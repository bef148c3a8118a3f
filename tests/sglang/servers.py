"""Real SGLang as a process.

What scripts/setup-sglang has built is used; nothing is built here. Logs stay in .data/sglang/logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.real.servers import ROOT, Server, free_ports, new_log, own_variables, running

HOME = ROOT / ".sglang"
DATA = ROOT / ".data" / "sglang"
PYTHON = HOME / "env" / "bin" / "python"
LORA = (
    "--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "16",
    "--lora-target-modules", "q_proj", "v_proj",
    "--max-loras-per-batch", "2", "--max-loaded-loras", "2",
)  # fmt: skip


def environment(ranks: int = 1) -> dict[str, str]:
    """Nothing of the developer's own settings, and nothing that leaves the machine."""
    return {
        **own_variables(),
        "PYTHONPATH": str(Path(__file__).with_name("shim")),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HOME": str(DATA / "huggingface"),
        "XDG_CACHE_HOME": str(DATA / "cache"),
        "DO_NOT_TRACK": "1",
        **({"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))} if ranks > 1 else {}),
    }


def options(folder: Path) -> tuple[str, ...]:
    """Of the sidecar, so that it offers all that it can. The memory saver is not there on a CPU:
    states and answers of a release are real, no byte is given back."""
    profiles = folder / "profiles"
    profiles.mkdir()
    return (
        "--rendezvous-allow=127.0.0.1:1024-65535",
        "--release-unconfigured",
        f"--profile-dir={profiles}",
    )


@contextmanager
def serving(
    model: Path, *arguments: str, lora: bool = False, port: int | None = None, ranks: int = 1
) -> Iterator[Server]:
    """An engine that serves `model` as `tiny`, until the block ends; then nothing of it is left.
    `port`: None is a free one. `ranks`: so many data-parallel ones."""
    port = port or free_ports(1)[0]
    command: Sequence[str] = [
        str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(model),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
        "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
        "--max-total-tokens", "16384", "--max-running-requests", "8", "--context-length", "4096",
        "--dtype", "bfloat16", *(LORA if lora else ()), "--dp-size", str(ranks), *arguments,
    ]  # fmt: skip
    with running(
        command, environment(ranks), new_log(DATA / "logs", "sglang"), name="sglang",
        engine="sglang", scheduler=b"sglang::scheduler", port=port,
    ) as server:  # fmt: skip
        yield server
