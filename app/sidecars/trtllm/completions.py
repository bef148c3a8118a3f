"""A GenerateRequest as a body of TensorRT-LLM's /v1/completions, which takes no field that it does
not know. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.rpc.openengine.v1 import generation_pb2 as pb
from app.sidecars.completions import CompletionEvents, body_of


class Completion(CompletionEvents):
    """Implements ``app.sidecars.streams.Exchange``. The server has no name for a request that
    somebody else could use: it ends one when its caller hangs up."""

    engine_id = ""

    def __init__(self, request: pb.GenerateRequest, _given: str) -> None:
        self.headers: Mapping[str, str] = {}
        self.body: Mapping[str, Any] = body_of(request)
