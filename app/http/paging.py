"""Keyset pages: an opaque token that is good for the filters it was given for, and no others."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query

from app.http.refusals import PageTokenInvalid

MAX_PAGE_SIZE = 1000
_CURSOR = re.compile(r"[\x21-\x7e]{1,128}")
_BIGGEST = 2**63 - 1

PageSize = Annotated[
    int,
    Query(ge=1, description=f"Items of a page; above {MAX_PAGE_SIZE} means {MAX_PAGE_SIZE}."),
]
PageToken = Annotated[
    str | None,
    Query(
        max_length=1024,
        description="`next_page_token` of the page before, with the same filters.",
    ),
]


def clamp(page_size: int) -> int:
    return min(page_size, MAX_PAGE_SIZE)


def token_of(cursor: int | str, filters: Mapping[str, Any]) -> str:
    """An opaque token for the page behind `cursor` of what `filters` select."""
    content = json.dumps([cursor, _digest(filters)], separators=(",", ":"))
    return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")


def number_of(token: str | None, filters: Mapping[str, Any]) -> int | None:
    """The number in a token of `token_of`; None: no token. Raises PageTokenInvalid."""
    cursor = _cursor_of(token, filters)
    if cursor is None:
        return None
    if type(cursor) is not int or not 0 <= cursor <= _BIGGEST:
        raise _damaged()
    return cursor


def text_of(token: str | None, filters: Mapping[str, Any]) -> str | None:
    """The text in a token of `token_of`; None: no token. Raises PageTokenInvalid."""
    cursor = _cursor_of(token, filters)
    if cursor is None:
        return None
    if not isinstance(cursor, str) or not _CURSOR.fullmatch(cursor):
        raise _damaged()
    return cursor


def next_link(path: str, query: Mapping[str, Any], token: str) -> dict[str, str]:
    """The `Link` header to the next page (RFC 8288), with the same filters."""
    again = {name: value for name, value in query.items() if value not in (None, [], ())}
    target = urlencode({**again, "page_token": token}, doseq=True)
    return {"Link": f'<{path}?{target}>; rel="next"'}


def _cursor_of(token: str | None, filters: Mapping[str, Any]) -> Any:
    if token is None:
        return None
    try:
        padded = token + "=" * (-len(token) % 4)
        cursor, digest = json.loads(base64.b64decode(padded, b"-_", validate=True))
    except (ValueError, TypeError, binascii.Error, RecursionError):
        raise _damaged() from None
    if digest != _digest(filters):
        raise PageTokenInvalid("The page token belongs to other filters.")
    return cursor


def _digest(filters: Mapping[str, Any]) -> str:
    canonical = json.dumps(filters, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _damaged() -> PageTokenInvalid:
    return PageTokenInvalid("The page token is not one that was given out here.")
