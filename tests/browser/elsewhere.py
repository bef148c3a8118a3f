"""Pages of other origins, on a server of their own: a page that a test makes up counts as one of
the public internet, and Chromium keeps those from loopback whatever the gateway says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Elsewhere(ThreadingHTTPServer):
    """Shows one page, whatever it is asked for."""

    html = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Shown)

    def page(self, host: str) -> str:
        """To a browser, `127.0.0.1` is another origin of the gateway's site, which its cookies go
        to, and `localhost` another site."""
        return f"http://{host}:{self.server_port}/"


class _Shown(BaseHTTPRequestHandler):
    server: Elsewhere

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f"<!doctype html><title>page</title>{self.server.html}".encode())

    def log_message(self, *_: object) -> None:
        """Nobody asks."""


@contextmanager
def elsewhere() -> Iterator[Elsewhere]:
    with Elsewhere() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
