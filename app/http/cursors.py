"""Where a reader of events stands: `<ledger identity>.<position>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CURSOR = re.compile(r"(?:([0-9a-f]{8})\.)?(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True, slots=True)
class Cursor:
    """`position` None: it was given, and is of another ledger or no cursor at all."""

    position: int | None


def cursor_text(identity: str, position: int) -> str:
    return f"{identity}.{position}"


def read_cursor(identity: str, last_event_id: str | None, after: str | None) -> Cursor | None:
    """None: neither was given. A bare position is taken to be of this ledger.

    The header wins: a browser's EventSource repeats the URL it was opened with, and its
    Last-Event-ID is the newer of the two.
    """
    given = last_event_id if last_event_id else after
    if given is None or given == "":
        return None
    found = _CURSOR.fullmatch(given)
    if found is None or (found[1] is not None and found[1] != identity):
        return Cursor(None)
    return Cursor(int(found[2]))
