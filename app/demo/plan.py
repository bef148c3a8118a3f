"""What a demo is asked to be, and what has to hold before anything is started."""

from __future__ import annotations

import importlib.util
import socket
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
DEFAULT_PORT = 8765
ENGINE_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")

ADMIN_AUDIENCE = "chadburn-admin"
INFERENCE_AUDIENCE = "chadburn-inference"
ENGINE_AUDIENCE = "chadburn-engine-admin"
CREDENTIAL = "demo-engine"
# Where a trainer on this machine may be met.
RENDEZVOUS = f"{HOST}:29500-29599"
TOKEN_TTL_S = 12 * 3600


class DemoRefused(Exception):
    """The demo cannot run; the message is the one line for its user."""


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on loopback; 0: the process takes a free one and says which."""

    gateway: int
    issuer: int
    inference: int
    admin: int

    @classmethod
    def counted_from(cls, port: int) -> Ports:
        """Raises DemoRefused for a number without room for four, or where one is taken."""
        if port == 0:
            return cls(0, 0, 0, 0)
        if not 1 <= port <= 65532:
            raise DemoRefused("--port must leave room for four ports below 65536, or be 0")
        names = ("gateway", "issuer", "engine's inference listener", "engine's admin listener")
        for number, name in enumerate(names, start=port):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((HOST, number))
                except OSError as error:
                    raise DemoRefused(
                        f"port {number} for the {name} is not free ({error.strerror}):"
                        f" end what uses it, or choose others with --port"
                    ) from error
        return cls(port, port + 1, port + 2, port + 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`traffic`: generations kept running. `ready_file`: a copy of the one in `data_dir`. `ranks`:
    processes that divide the engine's model."""

    data_dir: Path
    port: int = DEFAULT_PORT
    ready_file: Path | None = None
    traffic: int = 0
    step_delay_ms: int = 40
    checkpoint: Path | None = None
    ranks: int = 2


def check_packages() -> None:
    """Raises DemoRefused naming the first package that the engine lacks."""
    for name in ENGINE_PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise DemoRefused(
                f"the reference engine needs the package {name}: pip install 'chadburn[engine]'"
            )
