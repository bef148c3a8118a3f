"""A gateway that answers as it is told, over a real socket.

For what a real one does too seldom to be waited for: broken connections, outcomes that stay
unknown, an answer that gets lost. What the real one does is shown in tests/e2e.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

Json = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """`drop`: the connection ends after the request was read and before anything is said."""

    status: int = 200
    body: Any = None
    text: str | None = None
    kind: str = "application/json"
    drop: bool = False
    location: str | None = None


@dataclass
class Gateway:
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    answers: list[Answer | Callable[[Seen], Answer]] = field(default_factory=list)

    def then(self, answer: Answer | Callable[[Seen], Answer]) -> Gateway:
        """The next request is answered so. The last answer stands for all that follow."""
        self.answers.append(answer)
        return self

    def answer(self, seen: Seen) -> Answer:
        self.seen.append(seen)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(seen) if callable(answer) else answer


@contextmanager
def scripted(tls: ssl.SSLContext | None = None) -> Iterator[Gateway]:
    gateway = Gateway()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def _handle(self) -> None:
            length = int(self.headers.get("content-length", 0))
            raw = self.rfile.read(length)
            headers = {name.lower(): value for name, value in self.headers.items()}
            form = "form" in headers.get("content-type", "")
            body = dict(parse_qsl(raw.decode())) if form else json.loads(raw) if raw else None
            answer = gateway.answer(Seen(self.command, self.path, headers, body))
            self.close_connection = True
            if answer.drop:
                return
            text = answer.text if answer.text is not None else json.dumps(answer.body)
            sent = b"" if answer.status == 204 else text.encode()
            self.send_response(answer.status)
            self.send_header("content-type", answer.kind)
            self.send_header("connection", "close")
            if answer.location is not None:
                self.send_header("location", answer.location)
            if answer.kind != "text/event-stream" and answer.status != 204:
                self.send_header("content-length", str(len(sent)))
            self.end_headers()
            with suppress(ConnectionError):  # a client may have enough before all is sent
                self.wfile.write(sent)

        do_GET = do_PATCH = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815 - names that http.server calls

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """Clients that go away in the middle are what some tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    gateway.url = f"http://127.0.0.1:{server.server_address[1]}"
    if tls is not None:
        # The handshake is the thread's of the connection, not that of the one who accepts.
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        gateway.url = f"https://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield gateway
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def operation(state: str = "accepted", **changes: Any) -> Json:
    known: Json = {
        "id": "op-1",
        "engine": "torch-0",
        "kind": "pause",
        "state": state,
        "done": state in {"succeeded", "failed", "cancelled"},
        "result": {"pause_epoch": 3, "changed": True} if state == "succeeded" else None,
        "error": None,
        "verification": "verified" if state == "succeeded" else None,
        "warnings": [],
        "revision": 8 if state == "succeeded" else None,
        "created_at": "2026-03-01T12:00:00Z",
        "principal": {"issuer": "https://i", "subject": "ada", "client_id": "cli"},
    }
    if state == "failed":
        known["error"] = {
            "reason": "ENGINE_RESTARTED",
            "message": "the engine began anew",
            "effect": "unknown",
        }
    return known | changes


def event(position: int, kind: str, sequence: int, data: Json) -> str:
    document = {
        "position": position,
        "operation": "op-1",
        "engine": "torch-0",
        "sequence": sequence,
        "type": kind,
        "time": "2026-03-01T12:00:00.123Z",
        "data": data,
    }
    return f"id: 1a2b3c4d-{position}\nevent: {kind}\ndata: {json.dumps(document)}\n\n"


def stream(*events: str) -> Answer:
    return Answer(text="".join((": ping\n\n", *events)), kind="text/event-stream")


def problem(status: int, **members: Any) -> Answer:
    return Answer(status, members, kind="application/problem+json")
