"""Engines that speak `openengine.v1` themselves, as a kind that a sidecar administers."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from app.sidecars.allowed import Allowed
from app.sidecars.http import Patience
from app.sidecars.native.client import NativeClient
from app.sidecars.native.discovery import Discovered, discover
from app.sidecars.native.runtime import NativeRuntime, NativeWatch
from app.sidecars.notes import Notes


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeDialect:
    """Implements ``app.sidecars.serving.Dialect``. URLs are `grpc://host:port`."""

    name: str
    only_way: bool = False

    def connect(self, url: str, patience: Patience) -> NativeClient:
        return NativeClient(urlsplit(url).netloc, patience)

    async def discover(self, client: NativeClient, _allowed: Allowed) -> Discovered:
        return await discover(client)

    async def attach(
        self,
        client: NativeClient,
        found: Discovered,
        _allowed: Allowed,
        _notes: Notes,
        look_s: float,
    ) -> tuple[NativeRuntime, NativeWatch]:
        watch = NativeWatch(client, found, look_s, only_way=self.only_way)
        return NativeRuntime(client, found, watch, only_way=self.only_way), watch
