"""Recorded requests, sent to the layer in the order of the recording, and what differs on purpose.

`recorded.jsonl` has what vLLM 0.32.0 answered (its Python server on a CPU). Equal are the status,
the content type, and the form of the body: its names and types. Each row that differs has its
reason in `DIFFERENCES`; a reason that is not needed any more is as wrong as one that is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx2

RECORDED = Path(__file__).with_name("recorded.jsonl")

REASONS: Mapping[str, str] = {
    "body": "vLLM ignores the body of this endpoint and does something else than it says. Refused.",
    "ids": "vLLM takes what is no list of texts, and counts what it finds in it. Refused with 400.",
    "external": "A cache outside of the engine is no part of any order here.",
    "tag": "vLLM answers 200 to a tag that it does not know, and does nothing. Refused.",
    "state": "The state does not allow it. vLLM answers 500; here it is 409, and no order is sent.",
    "asleep": "vLLM lets its scheduler run on memory that is not there. Refused.",
    "number": "vLLM takes what is no number, or fails over what is no object. Refused with 400.",
    "cpu": "The recording's engine can't do it on a CPU; the double can.",
    "method": "Methods of a caller's choice are not passed on.",
    "checker": "`reset` overwrites weights that serve; other engines have no checksums to ask for.",
    "again": "The same order by the same caller, and the engine is as that left it: taken for a "
    "blind repetition, which succeeds again.",
    "in_place": "Not one order: the adapter would be gone in between if the second half failed.",
    "payload": "What travels is read here before the engine sees it: 400, where vLLM answers 500.",
    "draft": "The recording's engine has no draft model; the double has.",
    "files": "The recording's engine takes weights from a group; the double takes files too.",
    "unbacked": "An engine of dialect `openengine` has no such order, so there is no endpoint.",
}

DIFFERENCES: Mapping[str, str] = {
    "pause.body.ignored": "body",
    "wake.body.ignored": "body",
    "abort.int": "ids",
    "abort.listint": "ids",
    "abort.true": "ids",
    "idle2/reset_prefix_cache?reset_external=true": "external",
    "wake.notsleeping.badtag": "tag",
    "wake.badtag.mixed": "tag",
    "wake.commasep": "tag",
    "kvrelease.notpaused": "state",
    "kvrelease.partial": "state",
    "w.finish.nosession": "state",
    "w.finish.nosession.ver": "state",
    "resume.while.asleep": "asleep",
    "el.list": "number",
    "el.size.True": "number",
    "el.2": "cpu",
    "v.kvrelease": "cpu",
    "rpc.unknown": "method",
    "rpc.health": "method",
    "wc.checksum": "checker",
    "wc.reset": "checker",
    "prof.double": "again",
    "l.dup": "again",
    "u.again": "again",
    "l.inplace": "in_place",
    "w.update.empty": "payload",
    "w.update.after": "payload",
    "w.init.unknown": "payload",
    "w.init.partial": "payload",
    "w.draft": "draft",
    "w.init.empty": "files",
    "w.ver": "unbacked",
}


@dataclass(frozen=True, slots=True)
class Compared:
    """`differs`: in what, by names. `reason`: a key of REASONS; None: there is none."""

    name: str
    request: str
    recorded_status: int
    status: int
    differs: tuple[str, ...]

    @property
    def reason(self) -> str | None:
        return DIFFERENCES.get(self.name)

    @property
    def explained(self) -> bool:
        return bool(self.differs) == (self.reason is not None)


class Calls(Protocol):
    """Whatever answers as the layer does."""

    async def call(self, method: str, path: str, **how: Any) -> httpx2.Response: ...


async def compared(vllm: Calls, placed: Callable[[str], str] = lambda sent: sent) -> list[Compared]:
    """One after the other: what a request meets is what those before it left behind. `placed`: a
    body with the paths that are right there."""
    found = []
    for line in RECORDED.read_text().splitlines():
        row = json.loads(line)
        kind = row["sent_type"]
        answer = await vllm.call(
            row["method"],
            row["path"],
            headers={} if kind is None else {"content-type": kind},
            **({} if row["sent"] is None else {"content": placed(row["sent"]).encode()}),
        )
        ours = (answer.status_code, answer.headers.get("content-type"), form_of(answer.text))
        theirs = (row["status"], row["type"], form_of(row["said"]))
        parts = zip(("status", "content type", "body"), ours, theirs, strict=True)
        found.append(
            Compared(
                name=row["name"],
                request=_request(row),
                recorded_status=row["status"],
                status=answer.status_code,
                differs=tuple(what for what, one, other in parts if one != other),
            )
        )
    return found


def form_of(text: str) -> Any:
    try:
        return _form(json.loads(text))
    except ValueError:
        return text


def _form(value: Any) -> Any:
    if isinstance(value, dict):
        # What the configuration of an engine holds is its own.
        return {name: _form(part) for name, part in value.items() if name != "vllm_config"}
    if isinstance(value, list):
        return [_form(value[0])] if value else []
    return type(value).__name__


def _request(row: Mapping[str, Any]) -> str:
    sent = row["sent"]
    if sent is None:
        return f"{row['method']} {row['path']}"
    shown = sent if len(sent) <= 60 else f"{sent[:57]}..."
    return f"{row['method']} {row['path']} {shown}"


def document(rows: list[Compared]) -> str:
    """`docs/vllm-comparison.md`."""
    same = sum(not row.differs for row in rows)
    lines = [
        "# The endpoint layer beside vLLM 0.32.0",
        "",
        "Written by `scripts/gen-vllm-comparison`; a test holds it to what the layer does. Each",
        "row is a request whose answer by vLLM 0.32.0 (its Python server) was recorded, sent to",
        "the layer in flavour `0.32` over an engine double that offers every order. Compared are",
        "the status, the content type and the form of the body. Answers of the layer have more",
        "headers (`Cache-Control`, `X-Request-Id`, …).",
        "",
        f"{len(rows)} requests: {same} answered alike, {len(rows) - same} otherwise on purpose.",
        "",
        "| request | vLLM | here | differs in | why |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            _code(row.request),
            str(row.recorded_status),
            str(row.status),
            ", ".join(row.differs),
            REASONS[row.reason] if row.reason is not None else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")
