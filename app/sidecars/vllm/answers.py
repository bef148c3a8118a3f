"""What vLLM's answers mean. Pure; as recorded of 0.32 and 0.33."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_LONGEST = 300
_WORKER = re.compile(r"Worker failed with error '(.*?)', please check", re.DOTALL)
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Unreadable(ValueError):
    """An answer of a shape that such a server does not give."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        """Raises Unreadable."""
        try:
            found = json.loads(self.body)
            if b"\\ud" in self.body.lower():  # half a character, maybe, that can't be sent on
                json.dumps(found, ensure_ascii=False).encode()
            return found
        except (ValueError, RecursionError) as error:
            raise Unreadable("the engine answered something other than JSON") from error


def field_of(answer: Answer, name: str, kind: type) -> Any:
    """A field of a JSON object. Raises Unreadable for anything else, a wrong type included."""
    found = answer.json()
    value = found.get(name) if isinstance(found, dict) else None
    # bool is an int in Python, and no server means it so.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Unreadable(f"the engine's answer has no {name}")
    return value


def error_text(answer: Answer) -> str:
    """The server's words, from any of its four shapes: {"error": {"message"}}, {"error": text},
    {"detail": text}, and nothing at all. Shortened, and without what surrounds a worker's error."""
    text = ""
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        error = found.get("error", found.get("detail"))
        if isinstance(error, dict):
            error = error.get("message")
        text = error if isinstance(error, str) else ""
    inner = _WORKER.search(text)
    text = inner.group(1) if inner else text
    text = "".join(one if one.isprintable() else " " for one in text)[:_LONGEST].strip()
    return text or f"the engine answered with status {answer.status}"


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


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`parent` None: a base model or an alias of it; else an adapter on it."""

    name: str
    root: str
    parent: str | None
    max_model_len: int | None


def served_models(answer: Answer) -> tuple[ServedModel, ...]:
    """GET /v1/models. Raises Unreadable."""
    found = []
    for one in field_of(answer, "data", list):
        if not isinstance(one, dict) or not isinstance(one.get("id"), str):
            raise Unreadable("the engine's list of models cannot be read")
        length, parent = one.get("max_model_len"), one.get("parent")
        found.append(
            ServedModel(
                name=one["id"],
                root=str(one.get("root") or ""),
                parent=parent if isinstance(parent, str) else None,
                max_model_len=length if isinstance(length, int) else None,
            )
        )
    return tuple(found)


# ---- metrics ----


class Sleeping(StrEnum):
    """By the server's own labels; of KV alone it has none, and then all are 0."""

    AWAKE = "awake"
    OFFLOADED = "weights_offloaded"
    DISCARDED = "discard_all"
    KV_ALONE = "kv_alone"


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    samples: tuple[Sample, ...]

    def total(self, name: str, **labels: str) -> float | None:
        """Over all engines. None: the server does not tell it."""
        found = [
            one.value
            for one in self.samples
            if one.name == name and all(one.labels.get(k) == v for k, v in labels.items())
        ]
        return sum(found) if found else None

    def by_engine(self, name: str) -> dict[int, float]:
        """By number of the data-parallel engine."""
        return {
            int(one.labels["engine"]): one.value
            for one in self.samples
            if one.name == name and one.labels.get("engine", "").isdecimal()
        }

    @property
    def started_at(self) -> float | None:
        """Of the server's process, in Unix seconds. Another one means another process."""
        return self.total("process_start_time_seconds")

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
    """The exposition format of Prometheus, as far as it is used here. Lines of another form are
    passed over, and values that are no numbers: NaN would be another process each time."""
    found = []
    for line in answer.body.decode("utf-8", "replace").splitlines():
        matched = None if line.startswith("#") else _SAMPLE.match(line)
        if matched is None:
            continue
        name, labels, value = matched.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            found.append(Sample(name, dict(_LABEL.findall(labels or "")), number))
    return Metrics(tuple(found))
