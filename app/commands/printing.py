"""Lines for people, JSON for programs, and the exit code of an outcome."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from app.commands.ending import Exit
from app.commands.following import StreamEvent
from app.commands.http import Json

_EXITS = {
    "failed": Exit.FAILED,
    "cancelled": Exit.CANCELLED,
    "reconciling": Exit.UNKNOWN,
}


def show(document: Json) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def exit_of(operation: Json) -> Exit:
    """An operation that still goes on was accepted, which is what was asked for."""
    return _EXITS.get(operation["state"], Exit.OK)


def operation_line(operation: Json) -> str:
    """Kind, engine, state, what came of it, id."""
    parts = [operation["kind"], operation["engine"], operation["state"]]
    if operation.get("queue_position"):
        parts.append(f"place {operation['queue_position']}")
    error, result = operation.get("error"), operation.get("result")
    if error:
        parts.append(f"{error['reason']}: {error['message']}")
        if error.get("effect"):
            parts.append(f"effect {error['effect']}")
    elif result:
        parts.extend(
            f"{name}={_value(value)}" for name, value in result.items() if value is not None
        )
    if operation.get("verification") not in (None, "verified"):
        parts.append(operation["verification"])
    if operation.get("revision") is not None:
        parts.append(f"r{operation['revision']}")
    parts.extend(f"warning {item['reason']}" for item in operation.get("warnings") or [])
    return "  ".join([*parts, operation["id"]])


def event_line(event: StreamEvent) -> str:
    """Time, number, type and the little that its data says."""
    found: Json = event.data if isinstance(event.data, dict) else {}
    data = found.get("data") or {}
    clock = str(found.get("time", ""))[11:23]
    return f"{clock}  #{found.get('sequence', '?'):<3} {event.type:<11} {_said(data)}".rstrip()


def table(rows: Sequence[Sequence[Any]], heads: Sequence[str]) -> str:
    """Columns as wide as they need to be."""
    cells = [[str(cell) if cell is not None else "-" for cell in row] for row in rows]
    lines = [list(heads), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _said(data: Json) -> str:
    if "phase" in data:
        total = f"/{data['total']}" if data.get("total") else ""
        count = f" {data.get('done', 0)}{total} {data.get('unit', '')}" if data.get("unit") else ""
        return f"{data['phase']}{count}".rstrip()
    if "error" in data:
        return f"{data['error'].get('reason')}: {data['error'].get('message')}"
    return " ".join(
        f"{name}={_value(value)}" for name, value in data.items() if value not in ("", None)
    )


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
