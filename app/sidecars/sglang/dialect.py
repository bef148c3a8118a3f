"""SGLang as a kind of engine that a sidecar administers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from app.sidecars.allowed import Allowed
from app.sidecars.answers import Answer
from app.sidecars.http import EngineHttp, Patience, bearer
from app.sidecars.notes import Notes
from app.sidecars.sglang.answers import sglang_text
from app.sidecars.sglang.discovery import Discovered, discover
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.sglang.offer import Offer
from app.sidecars.sglang.runtime import SglangRuntime
from app.sidecars.sglang.watching import SglangWatch

# What an admin key is asked for. With both keys set each is refused where the other one is due.
ADMINISTRATIVE = frozenset(
    {
        "/abort_request",
        "/begin_weight_update",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/end_weight_update",
        "/flush_cache",
        "/init_weights_update_group",
        "/load_lora_adapter",
        "/pause_generation",
        "/pd_role_switch",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/start_profile",
        "/stop_profile",
        "/unload_lora_adapter",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
        "/weights_checker",
    }
)


def _whatever(_answer: Answer) -> bool:
    """A server that answers lives: when its scheduler ends, it goes along."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangDialect:
    """Implements ``app.sidecars.serving.Dialect``. `key` and `admin_key`: the server's own two, as
    far as it has them. `model_path`: where the files of its model are seen here, where it was named
    by a place in a hub."""

    key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    profile_root: Path | None = None
    model_path: Path | None = None
    stale_s: float = 20.0
    name = "sglang"

    def connect(self, url: str, patience: Patience) -> EngineHttp:
        return EngineHttp(
            url,
            headers=self._headers,
            words=sglang_text,
            alive_path="/ready",
            living=_whatever,
            patience=patience,
        )

    def _headers(self, _method: str, path: str, _body: bytes) -> Mapping[str, str]:
        ordinary = self.key or self.admin_key
        return bearer(self.admin_key or self.key) if path in ADMINISTRATIVE else bearer(ordinary)

    async def discover(self, http: EngineHttp, _allowed: Allowed) -> Discovered:
        return await discover(http)

    async def attach(
        self,
        http: EngineHttp,
        found: Discovered,
        allowed: Allowed,
        notes: Notes,
        look_s: float,
    ) -> tuple[SglangRuntime, SglangWatch]:
        engine = await SglangEngine.attach(http, found, allowed, notes, self.model_path)
        watch = SglangWatch(engine, look_s, self.stale_s)
        offer = Offer(
            found=found,
            allowed=allowed,
            models=engine.belief.models,
            root=engine.belief.root,
            profile_root=self.profile_root,
        )
        return SglangRuntime(engine, watch, offer), watch
