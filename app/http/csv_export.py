"""Tables as text/csv (RFC 4180), safe to open in a spreadsheet, streamed page by page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from enum import Enum
from typing import Any

from pydantic import BaseModel
from starlette.responses import StreamingResponse

from app.clock import rfc3339
from app.ledger.values import Page

MEDIA_TYPE = "text/csv"
_PAGE = 500
# A spreadsheet takes a cell that begins so for a formula, whoever wrote it into a `reason`.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")


def csv_reply(
    name: str,
    columns: Sequence[str],
    read: Callable[[int | None, int], Awaitable[Page[Any]]],
    document: Callable[[Any], BaseModel],
) -> StreamingResponse:
    """Every row that `read(before, size)` gives, page after page. Columns are fields of the
    document; those with a dot are fields of a nested one."""
    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return StreamingResponse(
        _rows(columns, read, document), 200, headers, f"{MEDIA_TYPE}; charset=utf-8"
    )


async def _rows(
    columns: Sequence[str],
    read: Callable[[int | None, int], Awaitable[Page[Any]]],
    document: Callable[[Any], BaseModel],
) -> AsyncIterator[str]:
    yield _line(columns)
    before: int | None = None
    while True:
        page = await read(before, _PAGE)
        lines = []
        for item in page.items:
            shown = document(item)
            lines.append(_line([_cell(_field(shown, column)) for column in columns]))
        if lines:
            yield "".join(lines)
        if not isinstance(page.next, int):
            return
        before = page.next


def _line(cells: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerow(cells)
    return out.getvalue()


def _field(shown: BaseModel, column: str) -> Any:
    value: Any = shown
    for part in column.split("."):
        value = None if value is None else getattr(value, part)
    return value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, datetime):
        return rfc3339(value)
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if not isinstance(value, str):
        value = json.dumps(value, sort_keys=True)
    return f"'{value}" if value.startswith(_FORMULA) else value
