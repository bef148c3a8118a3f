"""Which request this is, in logs, problems, operations and audit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from app.domain.operation import Actor, Operation

# W3C Trace Context: version 00 has exactly four parts; a later version may append more.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class RequestIds:
    """`request_id` is ours, one per request. `trace_id` is the caller's where it sent one."""

    request_id: str
    trace_id: str


_current: ContextVar[RequestIds | None] = ContextVar("request_ids", default=None)
_said: ContextVar[Callable[[], Mapping[str, str]]] = ContextVar("said", default=dict)


def current_ids() -> RequestIds | None:
    """The request this code runs for; None outside of one."""
    return _current.get()


def enter(ids: RequestIds, state: Mapping[str, Any] | None = None) -> None:
    """Make `ids` current for this task and those it starts. `state`: of the request; whoever turns
    out to be its caller is put there as `principal`."""
    _current.set(ids)
    _said.set(lambda: _of_request(ids, state or {}))


@contextmanager
def of_operation(operation: Operation, request_id: str | None) -> Iterator[None]:
    """What is logged meanwhile, in this task and those it starts, came of the operation.
    `request_id`: of the order, where this process took it on."""
    fields: dict[str, str] = {"operation_id": operation.id, **_of_caller(operation.actor)}
    if request_id is not None:
        fields["request_id"] = request_id
    if operation.trace_id is not None:
        fields["trace_id"] = operation.trace_id
    token = _said.set(lambda: fields)
    try:
        yield
    finally:
        _said.reset(token)


def what_it_came_of() -> Mapping[str, str]:
    """Fields of a line of the log that is written now; none outside of request and operation."""
    return _said.get()()


def trace_id_of(traceparent: str | None, new_trace_id: Callable[[], str]) -> str:
    """The trace a request belongs to: 32 hex digits, a new one unless it says a valid one."""
    found = _TRACEPARENT.fullmatch((traceparent or "").strip())
    if found is None:
        return new_trace_id()
    version, trace_id, span_id, _flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16):
        return new_trace_id()
    return trace_id if int(span_id, 16) else new_trace_id()


def _of_request(ids: RequestIds, state: Mapping[str, Any]) -> dict[str, str]:
    found = {"request_id": ids.request_id, "trace_id": ids.trace_id}
    caller = state.get("principal")
    return found if caller is None else {**found, **_of_caller(caller)}


def _of_caller(caller: Actor) -> dict[str, str]:
    """Of a principal too, which has these three."""
    return {"subject": caller.subject, "client_id": caller.client_id, "issuer": caller.issuer}
