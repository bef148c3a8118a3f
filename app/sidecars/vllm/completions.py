"""A GenerateRequest as a body of vLLM's /v1/completions. Pure but for the probe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.enginekit.runtime import RuntimeFault
from app.rpc.openengine.v1 import generation_pb2 as pb
from app.sidecars.completions import PATH, CompletionEvents, body_of
from app.sidecars.http import CallError, EngineHttp


class Completion(CompletionEvents):
    """Implements ``app.sidecars.streams.Exchange``."""

    def __init__(self, request: pb.GenerateRequest, given: str) -> None:
        self.headers: Mapping[str, str] = {"X-Request-Id": given}
        self.body: Mapping[str, Any] = {**body_of(request), "return_token_ids": True}
        if self.body.get("top_k") == 0:  # all of them, which vLLM writes as -1
            self.body = {**self.body, "top_k": -1}
        self.engine_id = f"cmpl-{given}-0"


async def probe(http: EngineHttp, model: str, within_s: float) -> None:
    """One token. Raises RuntimeFault."""
    body = {"model": model, "prompt": "probe", "max_tokens": 1}
    try:
        await http.post(PATH, body=body, within_s=within_s)
    except CallError as error:
        raise RuntimeFault("CANNOT_SERVE", error.message) from error
