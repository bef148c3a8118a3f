"""Health as it is told to whoever watches it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from app.conformance.case import NotHeld, NotPromised

_S = health_pb2.HealthCheckResponse.ServingStatus


class HealthWatch:
    """`call` is an open Watch."""

    def __init__(self, call: Any, patience_s: float) -> None:
        self._call = call
        self._patience_s = patience_s

    async def until(self, wanted: str, when: str) -> None:
        """Raises NotHeld when that status does not come, NotApplicable when none is ever told."""
        seen: list[str] = []
        try:
            async with asyncio.timeout(self._patience_s):
                while not seen or seen[-1] != wanted:
                    message: Any = await self._call.read()
                    if not isinstance(message, health_pb2.HealthCheckResponse):
                        raise NotHeld(f"{wanted} {when}", f"the watch ended after {seen}")
                    seen.append(_S.Name(message.status))
        except TimeoutError:
            raise NotHeld(f"{wanted} {when}", f"{seen or 'nothing'}") from None
        except grpc.aio.AioRpcError as error:
            # The health protocol leaves it to a server whether it can be watched.
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotPromised("health can be asked for, but not watched") from error
            raise NotHeld(f"{wanted} {when}", error.code().name) from error
