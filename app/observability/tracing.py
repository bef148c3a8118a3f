"""Which request this is, in logs, problems, operations and audit."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

# W3C Trace Context: version 00 has exactly four parts; a later version may append more.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class RequestIds:
    """`request_id` is ours, one per request. `trace_id` is the caller's where it sent one."""

    request_id: str
    trace_id: str


_current: ContextVar[RequestIds | None] = ContextVar("request_ids", default=None)


def current_ids() -> RequestIds | None:
    """The request this code runs for; None outside of one."""
    return _current.get()


def enter(ids: RequestIds) -> None:
    """Make `ids` current for this task and those it starts."""
    _current.set(ids)


def trace_id_of(traceparent: str | None, new_trace_id: Callable[[], str]) -> str:
    """The trace a request belongs to: 32 hex digits, a new one unless it says a valid one."""
    found = _TRACEPARENT.fullmatch((traceparent or "").strip())
    if found is None:
        return new_trace_id()
    version, trace_id, span_id, _flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16):
        return new_trace_id()
    return trace_id if int(span_id, 16) else new_trace_id()
