"""Calls to engines, as figures and as spans."""

from __future__ import annotations

import time

from app.observability.metrics import Metrics
from app.observability.spans import NO_SPAN, Span, SpanKind, Tracing

# Ends of calls that say nothing against the engine.
_WELL = frozenset({"OK", "CANCELLED"})


class EngineCalls:
    """A call that nobody asked for, such as the looking every few seconds, begins no trace."""

    def __init__(self, metrics: Metrics, tracing: Tracing) -> None:
        self._metrics = metrics
        self._tracing = tracing

    def begin(self, dialect: str, engine_id: str, method: str) -> _Call:
        """`method`: as `package.Service/Method`."""
        span = NO_SPAN
        if self._tracing.here():
            service, _, name = method.partition("/")
            said = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
            span = self._tracing.begin(
                method, SpanKind.CLIENT, {**said, "chadburn.engine": engine_id}
            )
        return _Call(self._metrics, span, dialect, method.rpartition(".")[2])


class _Call:
    def __init__(self, metrics: Metrics, span: Span, dialect: str, method: str) -> None:
        self._metrics = metrics
        self._span = span
        self._dialect = dialect
        self._method = method
        self._began = time.monotonic()

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        said = self._span.traceparent
        return () if said is None else (("traceparent", said),)

    def ended(self, code: str) -> None:
        lasted_s = time.monotonic() - self._began
        self._metrics.engine_called(self._dialect, self._method, code, lasted_s)
        self._span.note({"rpc.grpc.status_code": code})
        if code not in _WELL:
            self._span.fail(code)
        self._span.end()
