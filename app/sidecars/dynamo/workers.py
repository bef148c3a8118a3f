"""Which route of a worker carries out which order. Pure; by kind of worker.

A system server tells nobody which routes it has, and carries out whatever reaches one of them by
any method of HTTP: there is no looking before calling. So a kind is told by reads that it alone
has, or by whoever starts the sidecar.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from app.domain.kinds import PauseMode


class WorkerKind(StrEnum):
    """`VLLM`: Dynamo's worker with vLLM in it. `VLLM_SIDECAR`: Dynamo's own sidecar of a vLLM that
    runs by itself. `SGLANG`, `TRTLLM`: the workers with those in them."""

    VLLM = "vllm"
    VLLM_SIDECAR = "vllm-sidecar"
    SGLANG = "sglang"
    TRTLLM = "trtllm"


@dataclass(frozen=True, slots=True)
class Says:
    """What an answer has to say for the order to be carried out: a field and its values."""

    field: str
    values: tuple[Any, ...]


OK = Says("status", ("ok", "success"))
SUCCESS = Says("success", (True,))


@dataclass(frozen=True, slots=True)
class Route:
    """Below /engine/."""

    path: str
    says: Says = OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """None: this kind has none, or none that can be used without harm. `modes`: its words for the
    modes of a pause; a mode that is missing is waited for from here, as a drain. `paused`,
    `version`: reads, with the field that holds the answer. A worker without a pause closes by
    itself when it is put to sleep, and waits for its requests first; `limit`: how long, in its
    word."""

    pause: Route | None = None
    resume: Route | None = None
    modes: dict[PauseMode, str] = field(default_factory=dict)
    pause_options: dict[str, Any] = field(default_factory=dict)
    paused: tuple[str, str] | None = None
    version: tuple[str, str] | None = None
    alive: str | None = None
    flush: Route | None = None
    sleep: Route | None = None
    sleep_options: dict[str, Any] = field(default_factory=dict)
    limit: str | None = None
    wake: Route | None = None
    from_disk: Route | None = None
    update_options: dict[str, Any] = field(default_factory=dict)
    abort: Route | None = None
    load_lora: Route | None = None
    unload_lora: Route | None = None


_VLLM_MODES = {PauseMode.DRAIN: "wait", PauseMode.ABORT: "abort", PauseMode.KEEP: "keep"}
# Nobody's cache is emptied by an order that does not say so.
_KEEP_CACHE = {"clear_cache": False}

# By name, as released in ai-dynamo 1.6.1.
ROUTES: dict[WorkerKind, Routes] = {
    WorkerKind.VLLM: Routes(
        pause=Route("pause_generation"),
        resume=Route("resume_generation"),
        modes=_VLLM_MODES,
        pause_options=_KEEP_CACHE,
        version=("get_weight_version", "version"),
        alive="liveness_probe",
        flush=Route("flush_cache"),
        sleep=Route("control/sleep"),
        sleep_options={"level": 1},
        wake=Route("control/wake_up"),
        from_disk=Route("update_weights_from_disk"),
        abort=Route("abort_request"),
        load_lora=Route("load_lora"),
        unload_lora=Route("unload_lora"),
    ),
    WorkerKind.VLLM_SIDECAR: Routes(
        pause=Route("control/pause_generation", Says("status", ("paused",))),
        resume=Route("control/resume_generation", Says("status", ("resumed",))),
        modes=_VLLM_MODES,
        pause_options=_KEEP_CACHE,
        paused=("control/is_paused", "is_paused"),
        version=("control/get_weight_version", "weight_version"),
    ),
    WorkerKind.SGLANG: Routes(
        pause=Route("pause_generation"),
        resume=Route("continue_generation"),
        modes={PauseMode.ABORT: "abort", PauseMode.KEEP: "in_place"},
        from_disk=Route("control/update_weights_from_disk", SUCCESS),
        update_options={"flush_cache": True},
    ),
    WorkerKind.TRTLLM: Routes(
        sleep=Route("control/release_memory_occupation"),
        limit="timeout_s",
        wake=Route("control/resume_memory_occupation"),
    ),
}
