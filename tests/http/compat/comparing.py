"""Recorded requests, sent to the layer in the order of the recording. Equal are the status, the
content type, and the form of the body: its names and types. What differs has its reason; a reason
that is not needed any more is as wrong as one that is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx2


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """`recorded_status` None: the recorded engine ended over the request. `differs`: in what, by
    names. `reason`: a key of the recording's reasons; None: there is none."""

    name: str
    request: str
    recorded_status: int | None
    status: int
    differs: tuple[str, ...]
    reason: str | None

    @property
    def explained(self) -> bool:
        return bool(self.differs) == (self.reason is not None)


@dataclass(frozen=True, slots=True)
class Recording:
    """`differences`: by the names of requests. `form`: of a body, as it is compared."""

    path: Path
    differences: Mapping[str, str]
    form: Callable[[str], Any]


class Calls(Protocol):
    """Whatever answers as the layer does."""

    async def call(self, method: str, path: str, **how: Any) -> httpx2.Response: ...


def _as_sent(sent: str) -> str:
    return sent


async def compare(
    recording: Recording, calls: Calls, placed: Callable[[str], str] = _as_sent
) -> list[Compared]:
    """One after the other: what a request meets is what those before it left behind. `placed`: a
    body with the paths that are right there."""
    found = []
    for line in recording.path.read_text().splitlines():
        row = json.loads(line)
        kind = row["sent_type"]
        answer = await calls.call(
            row["method"],
            row["path"],
            headers={} if kind is None else {"content-type": kind},
            **({} if row["sent"] is None else {"content": placed(row["sent"]).encode()}),
        )
        form = recording.form
        ours = (answer.status_code, answer.headers.get("content-type"), form(answer.text))
        theirs = (row["status"], row["type"], None if row["said"] is None else form(row["said"]))
        parts = zip(("status", "content type", "body"), ours, theirs, strict=True)
        found.append(
            Compared(
                name=row["name"],
                request=_request(row),
                recorded_status=row["status"],
                status=answer.status_code,
                differs=tuple(what for what, one, other in parts if one != other),
                reason=recording.differences.get(row["name"]),
            )
        )
    return found


def form_of(text: str, own: Collection[str] = ()) -> Any:
    """`own`: names of objects below which each engine has what is its own."""
    try:
        return _form(json.loads(text), own)
    except ValueError:
        return text


def _form(value: Any, own: Collection[str]) -> Any:
    if isinstance(value, dict):
        return {name: _form(part, own) for name, part in value.items() if name not in own}
    if isinstance(value, list):
        return [_form(value[0], own)] if value else []
    return type(value).__name__


def _request(row: Mapping[str, Any]) -> str:
    sent = row["sent"]
    if sent is None:
        return f"{row['method']} {row['path']}"
    shown = sent if len(sent) <= 60 else f"{sent[:57]}..."
    return f"{row['method']} {row['path']} {shown}"


def table(rows: list[Compared], engine: str, reasons: Mapping[str, str]) -> list[str]:
    """Lines of Markdown."""
    same = sum(not row.differs for row in rows)
    lines = [
        f"{len(rows)} requests: {same} answered alike, {len(rows) - same} otherwise on purpose.",
        "",
        f"| request | {engine} | here | differs in | why |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            _code(row.request),
            "it ended" if row.recorded_status is None else str(row.recorded_status),
            str(row.status),
            ", ".join(row.differs),
            reasons[row.reason] if row.reason is not None else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")
