"""What SGLang's answers mean. Pure; as recorded of 0.5.23.

It says no in six shapes, and yes with status 200 and `null`, a text, or an object whose `success`
may be false. Words of a validation error name files of the server, and are not passed on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from app.sidecars.answers import Answer, Unreadable, field_of, said, words_of

_PATH = re.compile(r"""(?<![\w.])/[^\s'",:;)\]]+""")


def sglang_text(answer: Answer) -> str:
    """Its words, on one line, without paths of its machine."""
    words = words_of(answer)
    if not words and answer.body[:1] not in (b"{", b"["):
        words = answer.body.decode("utf-8", "replace").strip()
    if words.lstrip()[:1].isdigit() and "validation error" in words:
        words = "the engine does not take this body"
    found = _object(answer)
    if not words and isinstance(found.get("error_message"), str):
        words = found["error_message"]
    return said(_PATH.sub("(path)", words), answer)


def _object(answer: Answer) -> Mapping[str, Any]:
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def succeeded(answer: Answer) -> str:
    """{"success": true, "message"}: the message. Raises Unreadable: it is anything else, `success`
    false with status 200 among them."""
    if not field_of(answer, "success", bool):
        raise Unreadable(sglang_text(answer))
    return str(field_of(answer, "message", str))


def nothing(answer: Answer) -> None:
    """A body of `null`, which is all that the server says of memory. Raises Unreadable."""
    if answer.json() is not None:
        raise Unreadable("the engine answered with something where it has nothing to say")


def acknowledged(answer: Answer) -> None:
    """{"message", "status": "ok"}. Raises Unreadable."""
    status = field_of(answer, "status", str)
    if status != "ok":
        raise Unreadable(f"the engine says that it is {status}")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """GET /model_info, which never waits for the scheduler. `path` and `served_name` are those of
    the latest update from disk; `role`: null, prefill or decode."""

    path: str
    served_name: str
    weight_version: str
    role: str


def model_info(answer: Answer) -> ModelInfo:
    """Raises Unreadable."""
    role = field_of(answer, "disaggregation_mode", str)
    return ModelInfo(
        path=str(field_of(answer, "model_path", str)),
        served_name=str(field_of(answer, "served_model_name", str)),
        weight_version=str(field_of(answer, "weight_version", str)),
        role=str(role),
    )


@dataclass(frozen=True, slots=True)
class RankLoads:
    """`at`: when the scheduler last told of itself, in Unix seconds of the engine's machine. It
    stands still while the scheduler is stuck, and under a pause that holds the scheduler."""

    dp_rank: int
    at: float
    running: int
    waiting: int
    used_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Loads:
    """`age_s`: of what the latest of the ranks said, by the engine's own clock."""

    ranks: tuple[RankLoads, ...]
    age_s: float

    @property
    def in_flight(self) -> int:
        return sum(rank.running + rank.waiting for rank in self.ranks)


def loads(answer: Answer) -> Loads:
    """GET /v1/loads. Raises Unreadable."""
    found = []
    for one in field_of(answer, "loads", list):
        row = one if isinstance(one, dict) else {}
        found.append(
            RankLoads(
                dp_rank=_number(row, "dp_rank"),
                at=float(_real(row, "timestamp")),
                running=_number(row, "num_running_reqs"),
                waiting=_number(row, "num_waiting_reqs"),
                used_tokens=_number(row, "num_used_tokens"),
                total_tokens=_number(row, "max_total_num_tokens"),
            )
        )
    if not found:
        raise Unreadable("the engine tells the load of no rank")
    return Loads(tuple(found), _age_s(answer, min(rank.at for rank in found)))


def _age_s(answer: Answer, at: float) -> float:
    try:
        now = datetime.fromisoformat(str(field_of(answer, "timestamp", str))).timestamp()
    except ValueError:
        raise Unreadable("the engine's clock cannot be read") from None
    return max(0.0, now - at)


def _number(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Unreadable(f"the engine's load has no {name}")
    return value


def _real(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Unreadable(f"the engine's load has no {name}")
    return value


@dataclass(frozen=True, slots=True)
class Checksums:
    """Of one rank, by name of the tensor; names of a draft model begin with its role."""

    dp_rank: int
    pp_rank: int
    tp_rank: int
    sums: Mapping[str, str]


def checksums(answer: Answer) -> tuple[Checksums, ...]:
    """POST /weights_checker. Success may come without any rank. Raises Unreadable."""
    succeeded(answer)
    found = []
    for one in field_of(answer, "ranks", list):
        places = one.get("parallelism_info") if isinstance(one, dict) else None
        sums = one.get("checksums") if isinstance(one, dict) else None
        place = places[0] if isinstance(places, list) and places else None
        if not isinstance(place, dict) or not isinstance(sums, dict) or not sums:
            raise Unreadable("the engine's checksums cannot be read")
        found.append(
            Checksums(
                dp_rank=_number(place, "dp_rank"),
                pp_rank=_number(place, "pp_rank"),
                tp_rank=_number(place, "tp_rank"),
                sums={str(name): str(digest) for name, digest in sums.items()},
            )
        )
    return tuple(found)


def adapters_after(answer: Answer) -> Mapping[str, str]:
    """Of a load or an unload: names and paths of what is loaded then. Raises Unreadable."""
    if not field_of(answer, "success", bool):
        raise Unreadable(sglang_text(answer))
    return {
        str(name): str(path) for name, path in field_of(answer, "loaded_adapters", dict).items()
    }
