"""The baseline of event streams: sse-starlette, a queue for each stream, nothing kept.

`python -m tests.benchmarks.bare_streams PORT`
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import uvicorn
from fastapi import FastAPI
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse

from tests.benchmarks.reads import free_port, listening

_OTHERS = {f"field_{n}": "x" * 20 for n in range(10)}
"""So that an event is as long as one of the gateway's."""


def main() -> None:
    app = FastAPI()
    queues: set[asyncio.Queue[str]] = set()

    @app.get("/events")
    async def events() -> EventSourceResponse:
        queue: asyncio.Queue[str] = asyncio.Queue()
        queues.add(queue)

        async def told() -> AsyncIterator[ServerSentEvent]:
            yield ServerSentEvent(comment="begun")
            try:
                while True:
                    yield ServerSentEvent(await queue.get(), event="accepted", id="1", sep="\n")
            finally:
                queues.discard(queue)

        return EventSourceResponse(told())

    @app.post("/publish")
    async def publish() -> None:
        text = json.dumps({"time": datetime.now(UTC).isoformat(), **_OTHERS})
        for queue in queues:
            queue.put_nowait(text)

    port = int(sys.argv[1])
    uvicorn.run(app, host="127.0.0.1", port=port, access_log=False, log_level="warning")


@contextmanager
def bare_streams() -> Iterator[tuple[str, int]]:
    """Its URL, and the process."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.benchmarks.bare_streams", str(port)])
    try:
        listening(port)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.kill()  # its open streams would keep it
        process.wait()


if __name__ == "__main__":
    main()
