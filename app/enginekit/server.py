"""An engine's two listeners, from start to stop: what an engine's author calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime

from app.enginekit.runtime import Runtime
from app.enginekit.settings import KitSettings, SettingsError, TlsFiles, Verifier

__all__ = ["EngineServer", "KitSettings", "SettingsError", "TlsFiles", "Verifier"]


def utc_now() -> datetime:
    return datetime.now(UTC)


def random_id() -> str:
    return str(uuid.uuid4())


class EngineServer:
    """Serves `runtime`: `Inference` and the harmless part of `Control` on one listener,
    `OpenEngineAdmin` and all of `Control` on the other, gRPC health on both.

    One use: start once, stop once. Everything happens on the event loop that called `start`.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: KitSettings,
        *,
        now: Callable[[], datetime] = utc_now,
        new_id: Callable[[], str] = random_id,
    ) -> None: ...

    @property
    def inference_address(self) -> str:
        """As bound: `host:port` with the real port, or `unix:/path`. After `start`."""
        raise NotImplementedError

    @property
    def admin_address(self) -> str:
        raise NotImplementedError

    @property
    def instance_id(self) -> str:
        """New at each start; begins with the identity of the store. After `start`."""
        raise NotImplementedError

    async def start(self) -> None:
        """Open the store, begin a new life in it, then listen.

        Operations that an earlier life left open end failed with ENGINE_RESTARTED. Raises
        StoreInUse when another process has the store, OSError for an address that is taken.
        """
        raise NotImplementedError

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, end held requests, give running ones `grace_s`, then close all.

        An order that still runs is left open in the store: the next start ends it truthfully.
        Closes the runtime too.
        """
        raise NotImplementedError

    async def wait(self) -> None:
        """Until `stop` has been called and is done."""
        raise NotImplementedError
