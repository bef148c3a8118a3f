"""What a worker's answers mean. Pure; as recorded of Dynamo's runtime 1.6.1.

Status 200 says that a callback has returned, and nothing about what it did.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.sidecars.answers import Answer, Unreadable, field_of, said, shown
from app.sidecars.dynamo.workers import Says
from app.sidecars.exposition import Samples, samples_of

_GENERATE = "generate"


def worker_text(answer: Answer) -> str:
    """Of an answer other than 200: its kind of error alone. What follows is, of a callback that
    raised, whatever Python said, paths and all."""
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError):
        found = None
    error = found.get("error") if isinstance(found, dict) else None
    return said(error if isinstance(error, str) else "", answer)


def failure_of(answer: Answer) -> str | None:
    """What a callback says went wrong, under status 200; None: it says nothing of the kind. Raises
    Unreadable: it is no object."""
    found = answer.json()
    if not isinstance(found, dict):
        raise Unreadable("the worker answered something other than an object")
    failed = found.get("status") == "error" or found.get("success") is False
    if not failed and not found.get("error"):
        return None
    words = next((found[name] for name in ("message", "error") if found.get(name)), "")
    return shown(words if isinstance(words, str) else "") or "the worker says that it failed"


def carried_out(answer: Answer, says: Says) -> Mapping[str, Any]:
    """The answer of a callback that did not fail. Raises Unreadable: it does not say that it has
    done it either."""
    found = answer.json()
    value = found.get(says.field) if isinstance(found, dict) else None
    # 1 is True in Python, and no server means it so.
    if not any(value is one or (isinstance(one, str) and value == one) for one in says.values):
        raise Unreadable(f"the worker does not say that it has done it: no {says.field}")
    assert isinstance(found, dict)
    return found


def loras_of(answer: Answer) -> dict[str, int]:
    """GET /v1/loras: names and ids. Raises Unreadable."""
    found = field_of(answer, "loras", dict)
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in found.values()):
        raise Unreadable("the worker's list of adapters cannot be read")
    return {str(name): number for name, number in found.items()}


@dataclass(frozen=True, slots=True)
class Metrics(Samples):
    """Of GET /metrics, which the runtime answers by itself: no callback is asked."""

    @property
    def worker_id(self) -> str | None:
        """Of one worker, in hexadecimal. It may be the same again behind a restart, where it is
        derived from a name."""
        for sample in self.samples:
            found = sample.labels.get("worker_id")
            if found:
                return found
        return None

    @property
    def uptime_s(self) -> float | None:
        return self.total("dynamo_component_uptime_seconds")

    @property
    def in_flight(self) -> int | None:
        """Requests of the endpoint that generates, those of a paused engine among them. None: it
        has not served any endpoint yet."""
        found = self.total("dynamo_component_inflight_requests", dynamo_endpoint=_GENERATE)
        # A gauge that has been counted down once too often is none that anybody waits for.
        return None if found is None else max(int(found), 0)

    @property
    def model(self) -> str | None:
        """As the worker labels its endpoint."""
        for sample in self.samples:
            if sample.labels.get("dynamo_endpoint") == _GENERATE and sample.labels.get("model"):
                return sample.labels["model"]
        return None


def metrics_of(answer: Answer) -> Metrics:
    return Metrics(samples_of(answer.body))
