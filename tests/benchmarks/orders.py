"""How soon an order is acknowledged, and how soon it is done."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from tests.benchmarks.figures import Figure, milliseconds, percentile
from tests.e2e.conftest import Bridge
from tests.e2e.driving import server_sent

STREAMS = 8
ROUNDS = 200  # fewer, and the 99th percentile is the one worst
AIM_S = 0.1
_ACKNOWLEDGED = (
    f"{STREAMS} generations that never pause between two tokens, {STREAMS} readers of "
    f"`/v1/events`, all on this machine; {ROUNDS} pauses, each lifted before the next. From "
    "sending the request to the whole answer."
)
_COMPLETED = (
    f"{ROUNDS} pauses of an idle engine, each lifted before the next: from sending the request to "
    "the event `completed` on the operation's stream, which is opened after the answer."
)


async def acknowledgement(bridge: Bridge) -> list[Figure]:
    """POST pause to its 202, with generations running and event streams open."""
    taken: list[float] = []
    async with AsyncExitStack() as held:
        for _ in range(STREAMS):
            response = await held.enter_async_context(bridge.gateway.stream("/v1/events"))
            reading = asyncio.create_task(_read(response.aiter_lines()))
            held.callback(reading.cancel)
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            operation = await bridge.accepted("pause", {"mode": "keep"})
            taken.append(time.perf_counter() - begun)
            ended = await bridge.gateway.ended(operation["id"])
            await bridge.does("resume", {"pause_epoch": ended["result"]["pause_epoch"]})
    what = f"pause: POST to 202, {STREAMS} generations and {STREAMS} event streams"
    return [
        Figure(
            f"{what}, {name}", milliseconds(found), aim=f"≤ {milliseconds(AIM_S)}",
            met=found <= AIM_S, how=_ACKNOWLEDGED,
        )
        for name, found in (("p50", percentile(taken, 0.5)), ("p99", percentile(taken, 0.99)))
    ]  # fmt: skip


async def completion(bridge: Bridge) -> list[Figure]:
    """POST pause of an engine with nothing to do, to `completed` on the operation's stream."""
    taken: list[float] = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        operation = await bridge.accepted("pause", {"mode": "drain"})
        await bridge.gateway.hear(operation["id"])
        taken.append(time.perf_counter() - begun)
        ended = await bridge.gateway.ended(operation["id"])
        await bridge.does("resume", {"pause_epoch": ended["result"]["pause_epoch"]})
    what = "pause of an idle engine: POST to completed on the event stream"
    return [
        Figure(f"{what}, {name}", milliseconds(percentile(taken, share)), how=_COMPLETED)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]


async def _read(lines: object) -> None:
    async for _ in server_sent(lines):  # type: ignore[arg-type]
        pass
