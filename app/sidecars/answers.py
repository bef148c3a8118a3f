"""What the answers of engines' servers have in common. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LONGEST = 300


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


def words_of(answer: Answer) -> str:
    """What the server says of an error, in any of the usual shapes: {"error": {"message"}},
    {"error": text}, {"detail": text}, {"message": text}. Empty: nothing."""
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(found, dict):
        return ""
    error = found.get("error", found.get("detail", found.get("message")))
    if isinstance(error, dict):
        error = error.get("message")
    return error if isinstance(error, str) else ""


def error_text(answer: Answer) -> str:
    """Fit to be shown, and never empty."""
    return said(words_of(answer), answer)


def said(words: str, answer: Answer) -> str:
    return shown(words) or f"the engine answered with status {answer.status}"


def shown(text: str) -> str:
    """One line, and not a long one."""
    return "".join(one if one.isprintable() else " " for one in text)[:_LONGEST].strip()


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


def number_in(config: Mapping[str, Any], name: str) -> int | None:
    """None: not told, or told as something else."""
    found = config.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def text_in(config: Mapping[str, Any], name: str) -> str | None:
    found = config.get(name)
    return found if isinstance(found, str) else None
