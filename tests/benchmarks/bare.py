"""The baseline of reads: FastAPI with routes that make one gRPC call to the engine each.

`python -m tests.benchmarks.bare PORT ENGINE_ADDRESS`, the engine's token in ENGINE_TOKEN.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import uvicorn
from fastapi import FastAPI, Request
from google.protobuf.json_format import MessageToDict

from app.rpc.openengine.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    openengine_pb2_grpc,
    server_pb2,
)


def main() -> None:
    port, address, token = int(sys.argv[1]), sys.argv[2], os.environ["ENGINE_TOKEN"]
    metadata = (("authorization", f"Bearer {token}"),)

    @asynccontextmanager
    async def connected(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with grpc.aio.insecure_channel(address) as channel:
            yield {
                "engine": admin_pb2_grpc.OpenEngineAdminStub(channel),
                "control": openengine_pb2_grpc.ControlStub(channel),
            }

    app = FastAPI(lifespan=connected)

    @app.get("/engine")
    async def engine(request: Request) -> Any:
        asked = admin_pb2.GetAdminProfileRequest()
        profile = await request.state.engine.GetAdminProfile(asked, metadata=metadata, timeout=5)
        return MessageToDict(profile)

    @app.get("/load")
    async def load(request: Request) -> Any:
        asked = server_pb2.GetLoadRequest(include_per_rank=True)
        return MessageToDict(
            await request.state.control.GetLoad(asked, metadata=metadata, timeout=5)
        )

    uvicorn.run(app, host="127.0.0.1", port=port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
