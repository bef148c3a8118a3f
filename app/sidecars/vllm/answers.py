"""What vLLM's answers mean. Pure; as recorded of 0.32 and 0.33."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from app.sidecars.answers import Answer, field_of, said, words_of
from app.sidecars.exposition import Samples, samples_of

_WORKER = re.compile(r"Worker failed with error '(.*?)', please check", re.DOTALL)


def vllm_text(answer: Answer) -> str:
    """The server's words, without what surrounds a worker's error."""
    words = words_of(answer)
    inner = _WORKER.search(words)
    return said(inner.group(1) if inner else words, answer)


def says_paused(answer: Answer) -> bool:
    """GET /is_paused. Raises Unreadable."""
    return bool(field_of(answer, "is_paused", bool))


def says_sleeping(answer: Answer) -> bool:
    """GET /is_sleeping, which is also true of an engine that is only paused."""
    return bool(field_of(answer, "is_sleeping", bool))


def weight_version(answer: Answer) -> str | None:
    """GET /weight_info. None: it has none. Raises Unreadable."""
    return field_of(answer, "weight_version", str) or None


def flushed(answer: Answer) -> bool:
    """POST /reset_prefix_cache: with status 200 it may have failed all the same. The other caches'
    routes say nothing at all."""
    return not answer.body or bool(field_of(answer, "success", bool))


def updated(answer: Answer) -> None:
    """POST /update_weights: one front end says so, the other one nothing. Nothing that can be read
    shows whether weights have come. Raises Unreadable."""
    if answer.body:
        field_of(answer, "message", str)


# ---- metrics ----


class Sleeping(StrEnum):
    """By the server's own labels; of KV alone it has none, and then all are 0."""

    AWAKE = "awake"
    OFFLOADED = "weights_offloaded"
    DISCARDED = "discard_all"
    KV_ALONE = "kv_alone"


@dataclass(frozen=True, slots=True)
class Metrics(Samples):
    def by_engine(self, name: str) -> dict[int, float]:
        """By number of the data-parallel engine."""
        return self.by_number(name, "engine")

    @property
    def in_flight(self) -> int | None:
        """Requests that run or wait to. While the engine is paused, those that came meanwhile are
        not counted, and frozen ones are."""
        running = self.total("vllm:num_requests_running")
        waiting = self.total("vllm:num_requests_waiting")
        return None if running is None else int(running + (waiting or 0))

    @property
    def sleep(self) -> Sleeping | None:
        """None: not told. What was asked for, not what was done: a deeper level asked of an engine
        that is asleep shows, and does nothing. A waking in part does not show."""
        name = "vllm:engine_sleep_state"
        if self.total(name) is None:
            return None
        for state in (Sleeping.DISCARDED, Sleeping.OFFLOADED, Sleeping.AWAKE):
            if self.total(name, sleep_state=state.value):
                return state
        return Sleeping.KV_ALONE

    def adapters_in_use(self) -> frozenset[str]:
        """Names of adapters that requests run under, or wait to."""
        latest = max(
            (one for one in self.samples if one.name == "vllm:lora_requests_info"),
            key=lambda one: one.value,  # the time at which it was so
            default=None,
        )
        if latest is None:
            return frozenset()
        names = (
            *latest.labels.get("running_lora_adapters", "").split(","),
            *latest.labels.get("waiting_lora_adapters", "").split(","),
        )
        return frozenset(name for name in names if name)


def metrics_of(answer: Answer) -> Metrics:
    return Metrics(samples_of(answer.body))
