"""What a seal of the audit is made of. Pure: rows in, a digest out.

The digest is SHA-256 over lines of JSON in ASCII, without spaces and with the names of objects
sorted: first the seal, then each row in the order of ids. A line spells one thing only, and no line
can be taken for two, so two different contents never spell the same. Other releases have to spell
it the same way for ever; another spelling is another `FORM`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from app.ledger.values import Seal

_ID = re.compile(r"-?[0-9]{1,19}")

FORM = 1
MARK_CHARS = 16
GENESIS = "0" * 64
"""What the first seal of a ledger names as the one before it."""

COLUMNS = (
    *("id", "at", "action", "outcome", "issuer", "subject", "client_id", "engine_id"),
    *("operation_id", "reason", "note", "request_id", "trace_id", "source", "detail", "scopes"),
)
"""Of `FORM` 1. A column that is added to the audit is not among them."""


def sealed(seal: Seal, rows: Iterable[Mapping[str, Any]]) -> Seal:
    """The same with its digest, and the marks of the rows."""
    head = [
        "chadburn-audit-seal",
        *(seal.form, seal.number, seal.from_id, seal.to_id, seal.row_count),
        *(seal.previous, _moment(seal.sealed_at), seal.fence),
    ]
    digest = hashlib.sha256(_line(head))
    marks = []
    for row in rows:
        line = _line([_spelled(row[name]) for name in COLUMNS])
        digest.update(line)
        marks.append(f"{row['id']}:{hashlib.sha256(line).hexdigest()[:MARK_CHARS]}")
    return replace(seal, digest=digest.hexdigest(), marks=" ".join(marks))


def differing(before: Seal, now: Seal) -> dict[int, str]:
    """Which rows are not what they were, by their ids, and how. `now`: the same seal, made again.

    What marks say counts for nothing by itself: whether all is as it was, the digests say.
    """
    then, there = _marks_of(before), _marks_of(now)
    found = {}
    for row_id in sorted(then.keys() | there.keys()):
        if row_id not in there:
            found[row_id] = "removed"
        elif row_id not in then:
            found[row_id] = "put in"
        elif then[row_id] != there[row_id]:
            found[row_id] = "changed"
    return found


def _marks_of(seal: Seal) -> dict[int, str]:
    """What cannot be read is left out; it may have been written by anybody."""
    pairs = (word.partition(":") for word in seal.marks.split())
    return {int(row_id): mark for row_id, _, mark in pairs if _ID.fullmatch(row_id)}


def _spelled(value: Any) -> Any:
    return _moment(value) if isinstance(value, datetime) else value


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="microseconds")


def _line(values: list[Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"
