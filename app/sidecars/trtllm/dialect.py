"""TensorRT-LLM as a kind of engine that a sidecar administers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.sidecars.allowed import Allowed
from app.sidecars.http import EngineHttp, Patience
from app.sidecars.notes import Notes
from app.sidecars.trtllm.discovery import CONTROL, Discovered, discover
from app.sidecars.trtllm.engine import TrtllmEngine
from app.sidecars.trtllm.memory import TagMap
from app.sidecars.trtllm.runtime import TrtllmRuntime
from app.sidecars.trtllm.signing import Signer
from app.sidecars.trtllm.watching import TrtllmWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmDialect:
    """Implements ``app.sidecars.serving.Dialect``. `signer` None: the engine's memory is left
    alone. Nothing is noted: what of its memory is parked is read of the engine itself."""

    signer: Signer | None = field(default=None, repr=False)
    tags: TagMap = field(default_factory=TagMap)
    only_way: bool = False
    name: str = "trtllm"

    def connect(self, url: str, patience: Patience) -> EngineHttp:
        return EngineHttp(url, headers=self._headers, patience=patience)

    def _headers(self, method: str, path: str, body: bytes) -> Mapping[str, str]:
        if self.signer is None or path not in CONTROL:
            return {}
        return self.signer.headers(method, path, body)

    async def discover(self, http: EngineHttp, _allowed: Allowed) -> Discovered:
        return await discover(http, signed=self.signer is not None)

    async def attach(
        self,
        http: EngineHttp,
        found: Discovered,
        _allowed: Allowed,
        _notes: Notes,
        look_s: float,
    ) -> tuple[TrtllmRuntime, TrtllmWatch]:
        engine = TrtllmEngine(http, found, self.tags, only_way=self.only_way)
        if found.parks:
            await engine.read_memory()
        watch = TrtllmWatch(engine, look_s)
        return TrtllmRuntime(engine, watch), watch
