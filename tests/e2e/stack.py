"""Issuer, engine and gateway as three processes by themselves, each of which can be killed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from app.demo.plan import ADMIN_AUDIENCE, ENGINE_AUDIENCE, INFERENCE_AUDIENCE
from tests.e2e.conftest import Bridge
from tests.e2e.driving import Gateway
from tests.e2e.processes import Process, cleaned

ENGINE = "torch"


@dataclass
class Stack:
    folder: Path
    issuer: Process
    engine: Process
    gateway: Process
    engine_arguments: tuple[str, ...] = ()
    ready: dict[str, Any] = field(default_factory=dict)

    def start_engine(self) -> None:
        """On the addresses it had before, if it was there before."""
        path = self.folder / "engine.json"
        path.unlink(missing_ok=True)
        self.engine.arguments = [
            "engine",
            f"--data-dir={self.folder / 'engine'}",
            f"--inference-address={self.ready.get('inference_address', '127.0.0.1:0')}",
            f"--admin-address={self.ready.get('admin_address', '127.0.0.1:0')}",
            f"--issuer={self.ready['issuer']}",
            f"--inference-audience={INFERENCE_AUDIENCE}",
            f"--admin-audience={ENGINE_AUDIENCE}",
            "--step-delay-ms=20",
            f"--ready-file={path}",
            *self.engine_arguments,
        ]
        self.engine.start()
        self.ready |= self.engine.ready(path)

    def start_gateway(self) -> None:
        """The same."""
        path = self.folder / "gateway.json"
        path.unlink(missing_ok=True)
        port = self.ready.get("base_url", ":0").rpartition(":")[2]
        self.gateway.arguments = [
            "serve",
            f"--config={self.folder / 'gateway.toml'}",
            f"--port={port}",
            f"--ready-file={path}",
        ]
        self.gateway.start()
        self.ready |= self.gateway.ready(path)

    @property
    def bridge(self) -> Bridge:
        gateway = Gateway(self.ready["base_url"], self.ready["tokens"]["operator"])
        return Bridge(gateway, ENGINE, self.ready)


@contextmanager
def stack(
    folder: Path,
    database_url: str | None = None,
    engine_arguments: tuple[str, ...] = (),
    more: str = "",
    with_engine: bool = True,
    first: str = "",
) -> Iterator[Stack]:
    """All three started, or the two without the engine, which is registered by nobody yet.
    `database_url` None: SQLite. `more`: of the gateway's settings; `first`: those that belong to no
    table."""

    def process(name: str) -> Process:
        return Process(name, [], folder / f"{name}.log", folder)

    found = Stack(
        folder, process("issuer"), process("engine"), process("gateway"), engine_arguments
    )
    with cleaned(found.issuer, found.engine, found.gateway):
        _start_issuer(found)
        if with_engine:
            found.start_engine()
        (folder / "gateway.toml").write_text(first + _config(found, database_url) + more)
        found.start_gateway()
        yield found


def _start_issuer(found: Stack) -> None:
    folder = found.folder
    secret = secrets.token_urlsafe(24)
    (folder / "secret").write_text(secret)
    ready = folder / "issuer.json"
    found.issuer.arguments = [
        "dev-issuer",
        f"--data-dir={folder / 'issuer'}",
        f"--secret-file={folder / 'secret'}",
        f"--ready-file={ready}",
    ]
    found.issuer.start()
    issuer = found.issuer.ready(ready)["issuer"]
    tokens = {}
    for role in ("operator", "inference", "engine"):
        answer = httpx2.post(
            f"{issuer}/token", data={"grant_type": "client_credentials"}, auth=(role, secret)
        )
        tokens[role] = answer.json()["access_token"]
    found.ready |= {"issuer": issuer, "tokens": tokens}


def _config(found: Stack, database_url: str | None) -> str:
    text, issuer = json.dumps, found.ready["issuer"]
    database = "" if database_url is None else f"database_url = {text(database_url)}\n"
    return f"""\
data_dir = {text(str(found.folder / "gateway"))}
audience = {text(ADMIN_AUDIENCE)}
observe_interval_s = 0.5
{database}
[[issuers]]
issuer = {text(issuer)}
inference_audiences = [{text(INFERENCE_AUDIENCE)}]

[engine_credentials.torch.oauth]
token_url = {text(issuer + "/token")}
client_id = "engine"
client_secret_file = {text(str(found.folder / "secret"))}
"""


async def register(bridge: Bridge) -> None:
    address = bridge.ready["admin_address"]
    made = await bridge.gateway.client.post(
        "/v1/engines",
        json={
            "id": ENGINE,
            "members": [{"rank": 0, "admin": address, "control": address}],
            "tls": {"credential": "torch"},
        },
    )
    assert made.status_code == 201, made.text
    await bridge.gateway.open_again(ENGINE)
