"""Where spans go, and what becomes of a parent that only the ledger knows."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from app.observability.otlp import OtlpTracing, span_id_of
from app.observability.spans import NO_TRACING, OfOperation, Sent, SpanKind, spanned
from app.observability.traces import TracesRefused, opened_traces, sends_traces
from tests.doubles.otlp import Collector, Told, collecting, spans_of

pytestmark = pytest.mark.anyio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def collector() -> Any:
    with collecting() as found:
        yield found


@pytest.fixture
async def tracing(collector: Collector) -> AsyncIterator[OtlpTracing]:
    made = opened_traces(collector.endpoint, "kit")
    yield made
    await made.close(10)


async def test_who_goes_on_with_an_operation_is_below_who_took_it_on(
    collector: Collector, tracing: OtlpTracing
) -> None:
    with spanned(tracing, "take on", own="op-1", parent=Sent(f"00-{TRACE}-{'1' * 16}-01")):
        pass
    for _ in range(2):  # a life before a restart, and one after it
        with spanned(tracing, "drive", parent=OfOperation("op-1", TRACE)):
            pass
    await tracing.close(10)
    first, *rest = collector.spans()
    assert (first.trace, first.parent, first.id) == (TRACE, "1" * 16, f"{span_id_of('op-1'):016x}")
    assert {(span.name, span.trace, span.parent) for span in rest} == {("drive", TRACE, first.id)}
    assert len({span.id for span in rest}) == 2


async def test_what_its_caller_wants_left_out_is_left_out(
    collector: Collector, tracing: OtlpTracing
) -> None:
    with spanned(tracing, "take on", own="op-1", parent=Sent(f"00-{TRACE}-{'1' * 16}-00")) as span:
        assert (span.trace_id, span.sampled) == (TRACE, False)
        assert str(span.traceparent).endswith("-00")
    with spanned(tracing, "drive", parent=OfOperation("op-1", TRACE, span.sampled)):
        pass
    await tracing.close(10)
    assert collector.spans() == []


@pytest.mark.parametrize("said", [None, "", "nonsense", f"00-{'0' * 32}-{'1' * 16}-01"])
async def test_who_says_nothing_begins_a_trace(
    said: str | None, collector: Collector, tracing: OtlpTracing
) -> None:
    with spanned(tracing, "outer"), spanned(tracing, "asked", parent=Sent(said)):
        pass
    await tracing.close(10)
    asked, outer = collector.spans()
    assert (asked.parent, outer.parent) == ("", "")
    assert asked.trace != outer.trace


async def test_of_an_exception_its_type_alone(collector: Collector, tracing: OtlpTracing) -> None:
    with pytest.raises(ValueError, match="s3cret"), spanned(tracing, "fails"):
        raise ValueError("s3cret")
    await tracing.close(10)
    assert [span.failed for span in collector.spans()] == ["ValueError"]
    assert b"s3cret" not in b"".join(collector.raw)


async def test_by_grpc_where_the_variables_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Told] = []

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - its name there
            got.extend(spans_of(request.SerializeToString()))
            return pb.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named elsewhere")
    tracing = opened_traces(f"http://127.0.0.1:{port}", "kit")
    tracing.begin("one", SpanKind.INTERNAL).end()
    await tracing.close(10)
    server.stop(None)
    assert [(span.service, span.name) for span in got] == [("named elsewhere", "one")]


async def test_a_collector_that_is_gone_is_one_line_and_keeps_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    with caplog.at_level(logging.DEBUG):
        tracing = opened_traces("http://127.0.0.1:9/s3cret", "kit")
        for _ in range(3):
            tracing.begin("one", SpanKind.INTERNAL).end()
        await tracing.close(30)
    said = [r for r in caplog.records if r.levelno >= logging.INFO and "urllib3" not in r.name]
    assert [record.getMessage() for record in said] == [
        "traces are not taken, and are lost for the time being"
    ]


@pytest.mark.parametrize("where", ["collector:4318", "ftp://c", "http://user:s3cret@c", "http://"])
def test_an_endpoint_that_is_none_is_refused_and_not_quoted(where: str) -> None:
    with pytest.raises(TracesRefused) as refused:
        opened_traces(where, "kit")
    assert "s3cret" not in str(refused.value)


def test_a_protocol_that_is_not_spoken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(TracesRefused, match="http/json"):
        opened_traces("otel", "kit")


def test_without_the_extra_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "app.observability.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracesRefused, match=r"chadburn\[otel\]"):
        opened_traces("otel", "kit")


def test_variables_alone_switch_off_and_never_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c")
    assert (sends_traces(None), sends_traces("otel")) == (False, True)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not sends_traces("otel")
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not sends_traces("otel")
    assert not NO_TRACING.here()
