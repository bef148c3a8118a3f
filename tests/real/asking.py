"""Calls to a running engine as its own clients make them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from tests.real.servers import Server

READER = Path(__file__).with_name("reading.py")
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
    """A generation that goes on. `first`: a token has come; `ended`: all has been said.
    `finish`: why it ended in the engine's words; None when it broke off without any."""

    first: threading.Event
    ended: threading.Event
    finish: str | None = None
    error: str | None = None


@contextmanager
def streaming(server: Server, *, request_id: str = "", max_tokens: int = 3800) -> Iterator[Stream]:
    """A stream that is running when the block begins; some ten seconds long by itself.

    Read in a process of its own. A front end whose stream is read too slowly can keep an answer of
    its engine back behind what it has still to write, and a test that does other things beside is
    a slow reader.
    """
    asked = [server.url, server.engine, request_id, str(max_tokens)]
    stream = Stream(threading.Event(), threading.Event())
    with subprocess.Popen(
        [sys.executable, READER, *asked], stdout=subprocess.PIPE, text=True
    ) as process:
        hearer = threading.Thread(target=_hear, args=(process, stream))
        hearer.start()
        try:
            assert stream.first.wait(60), f"no token came: {stream.error}"
            yield stream
        except BaseException:
            process.kill()  # A test that failed waits for nothing.
            raise
        finally:
            hearer.join(120)
            process.kill()


def _hear(process: subprocess.Popen[str], stream: Stream) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        told = json.loads(line)
        if told["first"]:
            stream.first.set()
        stream.finish = told["finish"]
        stream.error = told["error"]
    stream.ended.set()
