"""The outermost layer: ids, safe headers, one log line, and an answer for our own defects."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.clock import IdSource
from app.http.problems import unexpected
from app.observability.log import logger
from app.observability.metrics import Metrics
from app.observability.spans import NO_TRACING, Sent, Span, SpanKind, Tracing
from app.observability.tracing import RequestIds, enter, trace_id_of

SAFE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_STREAM = "text/event-stream"
_HSTS = "max-age=31536000"
UNMATCHED = "unmatched"

MAX_SOURCE_CHARS = 80
# Asked every few seconds by machines, of what changes seldom.
_UNTRACED = frozenset({"/healthz", "/readyz", "/metrics"})
_REFUSED = frozenset({401, 403})
_log = logger("chadburn.http")


class Context:
    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        new_id: IdSource,
        new_trace_id: Callable[[], str],
        https: bool,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._new_id = new_id
        self._new_trace_id = new_trace_id
        self._https = https

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        said = Request(scope).headers.get("traceparent")
        tracing: Tracing = state.get("tracing", NO_TRACING)
        if scope["path"] in _UNTRACED:
            tracing = NO_TRACING
        method = {"http.request.method": scope["method"]}
        span = tracing.begin(scope["method"], SpanKind.SERVER, method, Sent(said))
        with tracing.current(span):
            traced = span.trace_id or trace_id_of(said, self._new_trace_id)
            await self._answered(scope, receive, send, RequestIds(self._new_id(), traced), span)

    async def _answered(
        self, scope: Scope, receive: Receive, send: Send, ids: RequestIds, span: Span
    ) -> None:
        state: dict[str, Any] = scope["state"]
        state["ids"] = ids
        enter(ids, state)
        # A proxy passes on what it likes; so long is an address at most, with a zone and a port.
        state["source"] = scope["client"][0][:MAX_SOURCE_CHARS] if scope.get("client") else "local"
        answer = _Answer(send, ids, self._https, lambda: _end(span, scope, answer))
        try:
            await self._app(scope, receive, answer)
        except ClientDisconnect:
            _log.info("client_gone")
        except Exception as error:
            _log.error("unexpected", exc_info=error, route=_route_of(scope))
            if answer.status is None:
                await unexpected(scope)(scope, receive, answer)
        finally:
            _end(span, scope, answer)
            self._tell(scope, answer, state)

    def _tell(self, scope: Scope, answer: _Answer, state: dict[str, Any]) -> None:
        route, status = _route_of(scope), answer.status or 499
        self._metrics.request_answered(scope["method"], route, status, answer.first_byte_s())
        principal = state.get("principal")
        if principal is not None and status not in _REFUSED:
            asked = state.get("asked_scopes") or (None,)
            for scope_name in asked:
                self._metrics.caller_admitted(scope_name.value if scope_name else "any")
        _log.info(
            "request",
            method=scope["method"],
            route=route,
            status=status,
            duration_ms=round(answer.elapsed_s() * 1000, 1),
            source=state["source"],
            subject=principal.subject if principal else None,
            client_id=principal.client_id if principal else None,
            issuer=principal.issuer if principal else None,
        )


class _Answer:
    """Passes messages on, adding headers to the first of them."""

    def __init__(
        self, send: Send, ids: RequestIds, https: bool, streams: Callable[[], None]
    ) -> None:
        """`streams`: told when it has begun and is one that goes on for as long as it likes."""
        self._streams = streams
        self._send = send
        self._ids = ids
        self._https = https
        self._started_s = time.monotonic()
        self._first_byte_s: float | None = None
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._first_byte_s = self.elapsed_s()
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._ids.request_id
            for name, value in SAFE_HEADERS.items():
                headers.setdefault(name, value)
            if self._https:
                headers.setdefault("Strict-Transport-Security", _HSTS)
            if headers.get("Content-Type", "").startswith(_STREAM):
                self._streams()
        await self._send(message)

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def first_byte_s(self) -> float:
        return self.elapsed_s() if self._first_byte_s is None else self._first_byte_s


def _route_of(scope: Scope) -> str:
    """The template: a path may hold what its sender would not want in a log."""
    template = getattr(scope.get("route"), "path", None)
    return template if isinstance(template, str) else UNMATCHED


def _end(span: Span, scope: Scope, answer: _Answer) -> None:
    """Of a stream at its beginning: a span of hours tells nobody anything. A second end is none."""
    route, status = _route_of(scope), answer.status or 499
    span.named(f"{scope['method']} {route}")
    span.note({"http.route": route, "http.response.status_code": status})
    if status >= 500:
        span.fail(str(status))
    span.end()
