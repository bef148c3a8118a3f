"""vLLM as a kind of engine that a sidecar administers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.sidecars.allowed import Allowed
from app.sidecars.http import EngineHttp, Patience, bearer
from app.sidecars.notes import Notes
from app.sidecars.vllm.answers import vllm_text
from app.sidecars.vllm.discovery import Discovered, discover
from app.sidecars.vllm.engine import VllmEngine
from app.sidecars.vllm.runtime import VllmRuntime
from app.sidecars.vllm.watching import VllmWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmDialect:
    """Implements ``app.sidecars.serving.Dialect``. `key` goes with requests below /v1 and nowhere
    else: the server asks for it there alone."""

    key: str | None = field(default=None, repr=False)
    name = "vllm"

    def connect(self, url: str, patience: Patience) -> EngineHttp:
        return EngineHttp(url, headers=self._headers, words=vllm_text, patience=patience)

    def _headers(self, _method: str, path: str, _body: bytes) -> Mapping[str, str]:
        return bearer(self.key) if path.startswith("/v1/") else {}

    async def discover(self, http: EngineHttp, _allowed: Allowed) -> Discovered:
        return await discover(http)

    async def attach(
        self,
        http: EngineHttp,
        found: Discovered,
        allowed: Allowed,
        notes: Notes,
        look_s: float,
    ) -> tuple[VllmRuntime, VllmWatch]:
        engine = await VllmEngine.attach(http, found, allowed, notes)
        watch = VllmWatch(engine, look_s)
        return VllmRuntime(engine, watch), watch
