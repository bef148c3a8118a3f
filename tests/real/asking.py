"""Calls to a running engine as its own clients make them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from tests.real.servers import Server

PROMPT = [5, 6, 7, 8, 9, 10]
Said = tuple[tuple[int, ...], tuple[float, ...]]


def client(server: Server, timeout_s: float = 120) -> httpx2.Client:
    """Every call on a connection of its own: behind an answer of 500, vLLM's Python server closes
    the connection without having said so, and the next call on it would be lost."""
    none_kept = httpx2.Limits(max_keepalive_connections=0)
    return httpx2.Client(base_url=server.url, timeout=timeout_s, limits=none_kept)


def generate(server: Server, *, model: str = "tiny", max_tokens: int = 24) -> Said:
    """Token ids and their log-probabilities, greedily: the same weights say the same."""
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    answer = client(server).post("/v1/completions", json=body)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    # The front ends print as many digits as they think fit.
    probabilities = tuple(round(each, 4) for each in choice["logprobs"]["token_logprobs"])
    return tuple(choice["token_ids"]), probabilities


def post(server: Server, path: str, body: object = None, **query: str) -> httpx2.Response:
    content: dict[str, Any] = {} if body is None else {"json": body}
    return client(server).post(path, params=query, **content)


def get(server: Server, path: str) -> Any:
    return client(server).get(path).json()


@dataclass
class Stream:
    """A generation that goes on in a thread. `first`: a token has come; `ended`: all has been said.
    `finish`: why it ended in the engine's words; None when it broke off without any."""

    first: threading.Event
    ended: threading.Event
    finish: str | None = None
    error: str | None = None
    connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Hang up: a test that failed waits for nothing."""
        if self.connection is not None and self.connection.sock is not None:
            self.connection.sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def streaming(server: Server, *, request_id: str = "", max_tokens: int = 3800) -> Iterator[Stream]:
    """A stream that is running when the block begins; some ten seconds long by itself."""
    stream = Stream(threading.Event(), threading.Event())
    reader = threading.Thread(target=_read, args=(server, stream, request_id, max_tokens))
    reader.start()
    try:
        assert stream.first.wait(60), f"no token came: {stream.error}"
        yield stream
    except BaseException:
        stream.close()
        raise
    finally:
        reader.join(120)


def _read(server: Server, stream: Stream, request_id: str, max_tokens: int) -> None:
    """With the standard library's client: hundreds of chunks in a second are no load for it."""
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "full ahead"}], "stream": True,
        "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    if request_id:
        headers["X-Request-Id"] = request_id
        if server.engine == "sglang":
            body["rid"] = request_id
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    stream.connection = connection
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        with connection.getresponse() as answer:
            for line in answer:
                _note(stream, line.removeprefix(b"data: ").strip())
    except (OSError, http.client.HTTPException) as error:
        stream.error = repr(error)
    finally:
        connection.close()
        stream.ended.set()


def _note(stream: Stream, line: bytes) -> None:
    if not line.startswith(b"{"):
        return
    event = json.loads(line)
    if "error" in event:
        stream.error = json.dumps(event["error"])
    for choice in event.get("choices", []):
        if choice.get("delta", {}).get("content"):
            stream.first.set()
        stream.finish = choice.get("finish_reason") or stream.finish
