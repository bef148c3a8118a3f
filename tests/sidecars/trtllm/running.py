"""A sidecar in this process, over the double of a TensorRT-LLM server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.sidecars.trtllm.dialect import TrtllmDialect
from app.sidecars.trtllm.signing import Scheme, Signer
from tests.doubles.trtllm_http import KEY, TrtllmDouble, running_trtllm
from tests.enginekit.client import Client
from tests.sidecars.sidecar import Sidecar, administered

KEYED = Signer(KEY)


def dialect(
    *, only_way: bool = False, scheme: Scheme = Scheme.REQUEST, key: str | None = KEY
) -> TrtllmDialect:
    signer = None if key is None else Signer(key, scheme)
    return TrtllmDialect(signer=signer, only_way=only_way)


@asynccontextmanager
async def trtllm_and_sidecar(
    tmp_path: Path, *, only_way: bool = False, double: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[TrtllmDouble, Sidecar, Client]]:
    async with (
        running_trtllm(**(double or {})) as trtllm,
        administered(trtllm, tmp_path / "data", dialect=dialect(only_way=only_way), **options) as (
            sidecar,
            client,
        ),
    ):
        yield trtllm, sidecar, client
