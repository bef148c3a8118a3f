"""Many engines in one process that cost next to nothing: what each says is made once.

`python -m tests.benchmarks.light_engines READY_FILE COUNT` listens on COUNT free ports, and on one
more whose engine takes 10 s for each order. They answer reads, and orders to end all requests. The
ready file has `{"admin_addresses": […], "slow": …}`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc

from app.enginekit.server import EngineServer, KitSettings
from app.rpc.openengine.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    lifecycle_pb2,
    model_pb2,
    openengine_pb2_grpc,
    server_pb2,
)
from tests.enginekit.minimal_engine import MinimalEngine

SLOW_S = 10.0


async def main() -> None:
    ready, count = Path(sys.argv[1]), int(sys.argv[2])
    said = await _said_by_the_kit()
    quick, slow = grpc.aio.server(), grpc.aio.server()
    for server, delay_s in ((quick, 0.0), (slow, SLOW_S)):
        admin = _Admin(said)  # type: ignore[abstract]
        admin_pb2_grpc.add_OpenEngineAdminServicer_to_server(admin, server)
        control = _Control(said, delay_s)  # type: ignore[abstract]
        openengine_pb2_grpc.add_ControlServicer_to_server(control, server)
    ports = [quick.add_insecure_port("127.0.0.1:0") for _ in range(count)]
    slow_port = slow.add_insecure_port("127.0.0.1:0")
    await quick.start()
    await slow.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    document = {
        "admin_addresses": [f"127.0.0.1:{port}" for port in ports],
        "slow": f"127.0.0.1:{slow_port}",
    }
    written = ready.with_suffix(".new")
    written.write_text(json.dumps(document))
    written.rename(ready)
    await stop.wait()
    await asyncio.gather(quick.stop(0), slow.stop(0))


async def _said_by_the_kit() -> dict[str, Any]:
    """What a small engine over the kit answers."""
    with tempfile.TemporaryDirectory() as folder:
        settings = KitSettings(data_dir=Path(folder), insecure_loopback=True)
        server = EngineServer(MinimalEngine(), settings)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(server.admin_address) as channel:
                admin = admin_pb2_grpc.OpenEngineAdminStub(channel)
                control = openengine_pb2_grpc.ControlStub(channel)
                info = await control.GetServerInfo(server_pb2.GetServerInfoRequest())
                model = model_pb2.GetModelInfoRequest(model=info.supported_models[0])
                return {
                    "profile": await admin.GetAdminProfile(admin_pb2.GetAdminProfileRequest()),
                    "info": info,
                    "model": await control.GetModelInfo(model),
                    "load": await control.GetLoad(server_pb2.GetLoadRequest()),
                }
        finally:
            await server.stop(0)


class _Admin(admin_pb2_grpc.OpenEngineAdminServicer):
    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said

    async def GetAdminProfile(self, request: Any, context: Any) -> admin_pb2.AdminProfile:  # noqa: N802
        profile: admin_pb2.AdminProfile = self._said["profile"]
        return profile


class _Control(openengine_pb2_grpc.ControlServicer):
    def __init__(self, said: dict[str, Any], delay_s: float) -> None:
        self._said = said
        self._delay_s = delay_s

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._said["info"]

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._said["model"]

    async def GetLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._said["load"]

    async def Abort(self, request: Any, context: Any) -> lifecycle_pb2.AbortResponse:  # noqa: N802
        await asyncio.sleep(self._delay_s)
        return lifecycle_pb2.AbortResponse(status=lifecycle_pb2.ABORT_STATUS_ABORTED)


if __name__ == "__main__":
    asyncio.run(main())
