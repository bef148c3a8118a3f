"""A sidecar in this process over the double of an SGLang server, with weights, adapters and
profiles below allowed roots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from app.enginekit.rendezvous import RendezvousRule
from app.sidecars.allowed import Allowed
from app.sidecars.http import Patience
from app.sidecars.sglang.dialect import SglangDialect
from tests.doubles.sglang_http import SglangDouble, running_sglang
from tests.enginekit.client import Client, pb, until
from tests.sidecars.checkpoints import adapter, checkpoint
from tests.sidecars.sidecar import Sidecar, administered

PATIENCE = Patience(read_s=2.0, control_s=10.0, watch_s=0.05)


@dataclass(frozen=True)
class Served:
    sglang: SglangDouble
    client: Client
    sidecar: Sidecar
    disk: pb.DiskWeights
    adapter: Path
    root: Path

    @property
    def model(self) -> Any:
        return self.sglang.model

    async def generates(self) -> bool:
        one = self.client.generate(stopping={"max_tokens": 2})
        return await one.finish_reason() == "LENGTH"


@asynccontextmanager
async def served(
    tmp_path: Path,
    *,
    model: dict[str, Any] | None = None,
    dialect: dict[str, Any] | None = None,
    patience: Patience = PATIENCE,
    look_s: float = 0.1,
    pickled: bool = False,
    **options: Any,
) -> AsyncIterator[Served]:
    root, profiles = tmp_path / "weights", tmp_path / "profiles"
    profiles.mkdir(exist_ok=True)
    new, lora = checkpoint(root / "new", 2), adapter(root / "lora")
    allowed = Allowed(
        weights_roots=(root,),
        lora_roots=(root,),
        rendezvous=(RendezvousRule.parse("127.0.0.0/8:1-65535"),),
        pickled=pickled,
    )
    own = SglangDialect(profile_root=profiles, stale_s=0.5, **(dialect or {}))
    async with (
        running_sglang(checkpoint(tmp_path / "model", 1), model=model, **options) as sglang,
        administered(
            sglang,
            tmp_path / "data",
            dialect=own,
            allowed=allowed,
            patience=patience,
            look_s=look_s,
        ) as (sidecar, client),
    ):
        yield Served(sglang, client, sidecar, pb.DiskWeights(path=str(new)), lora, root)


async def asked(sglang: SglangDouble, rid: str, tokens: int = 100_000) -> asyncio.Task[str]:
    """A request that a client sends to the engine itself, once it runs. The task ends with how it
    ended."""

    async def read() -> str:
        body = {"text": "x", "rid": rid, "sampling_params": {"max_new_tokens": tokens}}
        async with httpx2.AsyncClient(timeout=None, trust_env=False) as http:
            answer = await http.post(f"{sglang.url}/generate", json=body)
        return str(answer.json()["meta_info"]["finish_reason"]["type"])

    task = asyncio.create_task(read())
    await until(lambda: any(one.rid == rid and one.runs for one in sglang.model.requests))
    return task


@asynccontextmanager
async def trainer(sglang: SglangDouble) -> AsyncIterator[int]:
    """Somebody who listens, and completes the group there. Gives the port."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = int(server.sockets[0].getsockname()[1])
        sglang.model.members.add(port)
        yield port
