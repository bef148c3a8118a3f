"""Spans by OpenTelemetry's SDK, sent by OTLP. The one module that imports it, and only where traces
were switched on: the SDK is an extra (`otel`), and costs a fifth of a second to import.

What the SDK's own variables say (`OTEL_…`: endpoint, protocol, headers, sampler, batches, resource)
holds. Its own log does not: it quotes addresses and repeats itself with every batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, cast

from opentelemetry import context as current_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app import __version__
from app.observability.spans import Attributes, OfOperation, Parent, Sent, Span, SpanKind

_KINDS = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP, _GRPC = "http/protobuf", "grpc"
_PATH = "/v1/traces"
_propagator = TraceContextTextMapPropagator()
log = logging.getLogger(__name__)


class ProtocolUnknown(ValueError):
    """OTEL_EXPORTER_OTLP_PROTOCOL names one that is not spoken here."""


def span_id_of(operation_id: str) -> int:
    """The number of the span under which the operation was taken on: the same for whoever goes on
    with it, and never 0, which is none."""
    return int.from_bytes(hashlib.sha256(operation_id.encode()).digest()[:8], "big") or 1


class OtlpTracing:
    """Implements `Tracing`. One for a process, closed at its end."""

    def __init__(self, service: str, endpoint: str | None) -> None:
        """`service`: its name, unless OTEL_SERVICE_NAME says another. `endpoint`: of the collector,
        without a path; None: what the variables say, or this machine's. Raises ProtocolUnknown."""
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
        resource = Resource.create({**named, "service.version": __version__})
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        exporter = _Exporter(_exporter_to(endpoint))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("chadburn", __version__)

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes | None = None,
        parent: Parent = None,
        own: str | None = None,
    ) -> Span:
        above = self._above(parent, name)
        with self._ids.chosen(None if own is None else span_id_of(own)):
            begun = self._tracer.start_span(
                name,
                above,
                _KINDS[kind],
                dict(attributes or {}),
                # A message of an exception may quote what somebody sent.
                record_exception=False,
                set_status_on_exception=False,
            )
        return _Span(begun)

    @contextmanager
    def current(self, span: Span) -> Iterator[None]:
        token = current_context.attach(trace.set_span_in_context(cast("_Span", span).inner))
        try:
            yield
        finally:
            current_context.detach(token)

    def here(self) -> bool:
        return trace.get_current_span().get_span_context().is_valid

    async def close(self, within_s: float) -> None:
        """Send what is left, unless that takes longer: a collector that is gone must not keep the
        process from its end."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def shut() -> None:
            self._provider.shutdown()
            # The loop may have gone on without this one.
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut, name="traces-end", daemon=True).start()
        try:
            async with asyncio.timeout(within_s):
                await done.wait()
        except TimeoutError:
            log.warning("the last traces were left behind")

    def _above(self, parent: Parent, name: str) -> current_context.Context | None:
        match parent:
            case None:
                return None
            case Sent(traceparent=said):
                # Not below what happens to be current, if it says nothing.
                nothing = current_context.Context()
                return _propagator.extract({"traceparent": said or ""}, nothing)
            case OfOperation(trace_id=None):
                return current_context.Context()
            case OfOperation(operation_id=operation_id, trace_id=trace_id, sampled=sampled):
                assert trace_id is not None
                number = int(trace_id, 16)
                if sampled is None:
                    # The same answer for a trace wherever it is asked; of the caller's own wish
                    # that it be left out the ledger does not know.
                    judged = self._provider.sampler.should_sample(None, number, name)
                    sampled = judged.decision is Decision.RECORD_AND_SAMPLE
                flags = trace.TraceFlags.SAMPLED if sampled else trace.TraceFlags.DEFAULT
                kept = trace.SpanContext(
                    number,
                    span_id_of(operation_id),
                    is_remote=True,
                    trace_flags=trace.TraceFlags(flags),
                )
                return trace.set_span_in_context(
                    trace.NonRecordingSpan(kept), current_context.Context()
                )


class _Span:
    def __init__(self, inner: trace.Span) -> None:
        self.inner = inner

    @property
    def trace_id(self) -> str | None:
        return trace.format_trace_id(self.inner.get_span_context().trace_id)

    @property
    def traceparent(self) -> str | None:
        said = self.inner.get_span_context()
        number = trace.format_span_id(said.span_id)
        return f"00-{self.trace_id}-{number}-{int(said.trace_flags) & 1:02x}"

    @property
    def sampled(self) -> bool | None:
        return self.inner.get_span_context().trace_flags.sampled

    def note(self, attributes: Attributes) -> None:
        self.inner.set_attributes(dict(attributes))

    def event(self, name: str, attributes: Attributes) -> None:
        self.inner.add_event(name, dict(attributes))

    def fail(self, why: str) -> None:
        self.inner.set_status(trace.StatusCode.ERROR, why)

    def named(self, name: str) -> None:
        self.inner.update_name(name)

    def end(self) -> None:
        self.inner.end()


class _Ids(RandomIdGenerator):
    def __init__(self) -> None:
        self._chosen: ContextVar[int | None] = ContextVar("span_id", default=None)

    @contextmanager
    def chosen(self, span_id: int | None) -> Iterator[None]:
        token = self._chosen.set(span_id)
        try:
            yield
        finally:
            self._chosen.reset(token)

    def generate_span_id(self) -> int:
        return self._chosen.get() or super().generate_span_id()


class _MakesExporter(Protocol):
    def __call__(self, *, endpoint: str | None) -> SpanExporter: ...


def _exporter_to(endpoint: str | None) -> SpanExporter:
    """By the protocol that the variables name; without them HTTP, as the SDK has it."""
    said = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), _HTTP)
    if said not in _EXPORTERS:
        raise ProtocolUnknown(f"{said!r} is no protocol of traces: take {_HTTP} or {_GRPC}")
    return _EXPORTERS[said](endpoint)


def _by_http(endpoint: str | None) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    at = None if endpoint is None else endpoint.rstrip("/") + _PATH
    return cast("_MakesExporter", OTLPSpanExporter)(endpoint=at)


def _by_grpc(endpoint: str | None) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return cast("_MakesExporter", OTLPSpanExporter)(endpoint=endpoint)


_EXPORTERS: dict[str, Callable[[str | None], SpanExporter]] = {_HTTP: _by_http, _GRPC: _by_grpc}


class _Exporter(SpanExporter):
    """Says once that spans are not taken, and once that they are again."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._well = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        well = result is SpanExportResult.SUCCESS
        if well is not self._well:
            self._well = well
            if well:
                log.warning("traces are taken again")
            else:
                log.warning("traces are not taken, and are lost for the time being")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)
