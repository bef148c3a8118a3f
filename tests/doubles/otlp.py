"""A collector that keeps what it is sent: OTLP over HTTP, parsed by the protocol's own messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Told:
    """One span. Ids as hex; `parent` empty: it has none."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    failed: str


@dataclass
class Collector:
    endpoint: str = ""
    raw: list[bytes] = field(default_factory=list)

    def spans(self) -> list[Told]:
        return [span for body in list(self.raw) for span in spans_of(body)]


def spans_of(body: bytes) -> Iterator[Told]:
    for of in ExportTraceServiceRequest.FromString(body).resource_spans:
        (service,) = [
            pair.value.string_value for pair in of.resource.attributes if pair.key == "service.name"
        ]
        for scope in of.scope_spans:
            for span in scope.spans:
                yield Told(
                    service=service,
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    attributes={
                        pair.key: getattr(
                            pair.value, pair.value.WhichOneof("value") or "string_value"
                        )
                        for pair in span.attributes
                    },
                    failed=span.status.message if span.status.code == 2 else "",
                )


@contextmanager
def collecting() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                found.raw.append(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as there
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
