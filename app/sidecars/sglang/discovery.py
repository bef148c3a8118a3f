"""What an SGLang server is and offers, found out once, without changing anything.

`/server_info` tells the server's keys in clear: what is needed is picked from it, and the rest is
let go at once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from app.sidecars.answers import Unreadable, number_in, served_models, text_in
from app.sidecars.http import EngineHttp, Refused, WrongAnswer
from app.sidecars.sglang.answers import model_info

# Asked of the scheduler, which may be in the midst of something.
_SERVER_INFO_S = 20.0
_OLDEST = (0, 5, 23)
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Identity:
    """Of one life of the engine: what its start drew by lot, and how long the parts of that start
    took. The server tells neither a start time nor an instance."""

    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """Sizes in ranks, requests and tokens; None: not told. `paths`: routes that are there. `saves`:
    it was started so that releasing gives memory back; `backs_up`: and keeps weights meanwhile.
    `elastic`: more ranks can be added. `switches`: its role can be switched. `locked`: its weights
    are shared with other engines, and must not be touched."""

    version: str
    identity: Identity
    models: tuple[str, ...]
    root: str
    role: str
    paths: frozenset[str]
    world_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    attention_parallel: bool = False
    page_size: int = 1
    total_tokens: int | None = None
    max_running: int | None = None
    max_batched_tokens: int | None = None
    context_length: int | None = None
    device: str = ""
    saves: bool = False
    backs_up: bool = False
    elastic: bool = False
    switches: bool = False
    locked: bool = False
    draft_root: str | None = None
    adapters: bool = False
    lora_slots: int | None = None

    def has(self, *paths: str) -> bool:
        return self.paths >= set(paths)


async def discover(http: EngineHttp) -> Discovered:
    """Raises NotSent, NoAnswer, Refused (a key that is not taken among others), WrongAnswer."""
    try:
        return await _discover(http)
    except Unreadable as error:
        raise WrongAnswer(f"no SGLang server answers there: {error}") from error


async def _discover(http: EngineHttp) -> Discovered:
    model = model_info(await http.read("/model_info"))
    bases = [one for one in served_models(await http.read("/v1/models")) if one.parent is None]
    info = await server_info(http)
    version = text_in(info, "version") or ""
    matched = _VERSION.match(version)
    if matched is None or tuple(map(int, matched.groups())) < _OLDEST:
        raise WrongAnswer(f"SGLang {version} is not known here: 0.5.23 and later are")
    await _admitted(http)
    sizes = {name: number_in(info, f"{name}_size") or 1 for name in ("tp", "pp", "dp")}
    attention = info.get("enable_dp_attention") is True
    across = sizes["tp"] * sizes["pp"]
    told = number_in(_first_of(info.get("internal_states")), "world_size")
    drafting = bool(info.get("speculative_algorithm"))
    return Discovered(
        version=version,
        identity=identity_of(info),
        models=(model.served_name, *(m.name for m in bases if m.name != model.served_name)),
        root=model.path,
        role=model.role,
        paths=await _paths(http),
        world_size=told or (across if attention else across * sizes["dp"]),
        tensor_parallel_size=sizes["tp"],
        pipeline_parallel_size=sizes["pp"],
        data_parallel_size=sizes["dp"],
        attention_parallel=attention,
        page_size=number_in(info, "page_size") or 1,
        total_tokens=number_in(info, "max_total_num_tokens") or number_in(info, "max_total_tokens"),
        max_running=number_in(info, "max_running_requests"),
        max_batched_tokens=number_in(info, "max_prefill_tokens"),
        context_length=bases[0].max_model_len if bases else number_in(info, "context_length"),
        device=text_in(info, "device") or "",
        saves=info.get("enable_memory_saver") is True,
        backs_up=info.get("enable_weights_cpu_backup") is True,
        elastic=text_in(info, "elastic_ep_backend") is not None,
        switches=info.get("enable_pd_role_switch") is True and model.role != "null",
        locked=(text_in(info, "weight_cache_mode") or "off") != "off",
        draft_root=(text_in(info, "speculative_draft_model_path") or "") if drafting else None,
        adapters=info.get("enable_lora") is True and sizes["dp"] == 1,
        lora_slots=number_in(info, "max_loaded_loras"),
    )


async def server_info(http: EngineHttp, within_s: float = _SERVER_INFO_S) -> Mapping[str, Any]:
    """With keys in it: look, take, and forget. Raises CallError, Unreadable."""
    answer = await http.get("/server_info", within_s=within_s)
    if answer.status != 200:
        raise Refused(answer.status, f"the engine does not describe itself ({answer.status})")
    found = answer.json()
    if not isinstance(found, dict):
        raise Unreadable("the engine's description of itself cannot be read")
    return found


def identity_of(info: Mapping[str, Any]) -> Identity:
    """Raises Unreadable."""
    started, seed = info.get("startup_time"), info.get("random_seed")
    if not isinstance(started, dict) or not started:
        raise Unreadable("the engine does not tell how it started")
    words = json.dumps([started, seed, info.get("port")], sort_keys=True)
    return Identity(hashlib.sha256(words.encode()).hexdigest()[:32])


async def _admitted(http: EngineHttp) -> None:
    """Whether orders would be taken: a key may be good for reading alone. An id that nobody has
    ends nothing, whatever an engine compares ids by. Raises CallError."""
    await http.post("/abort_request", body={"rid": f"chadburn-{uuid4().hex}"}, within_s=10.0)


async def _paths(http: EngineHttp) -> frozenset[str]:
    """From its own description: some of its orders come by GET too, so none can be tried."""
    answer = await http.read("/openapi.json")
    found = answer.json()
    paths = found.get("paths") if isinstance(found, dict) else None
    if not isinstance(paths, dict):
        raise Unreadable("the engine's list of routes cannot be read")
    return frozenset(str(path) for path in paths)


def _first_of(found: Any) -> Mapping[str, Any]:
    first = found[0] if isinstance(found, list) and found else None
    return first if isinstance(first, dict) else {}
