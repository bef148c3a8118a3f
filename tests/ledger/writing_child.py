"""A process that writes into a ledger until it is killed, and says what was acknowledged.

`python -m tests.ledger.writing_child URL NUMBER`; prints `ready`, then one line per acknowledged
write: the operation's id, its sequence and its key.
"""

from __future__ import annotations

import asyncio
import sys

from app.clock import SystemClock
from app.domain.errors import EngineBusy
from app.domain.kinds import OperationKind
from app.domain.operation import Operation, Progress
from app.domain.transitions import Completed, Dispatched, Fact, Progressed
from app.ledger import Ledger
from tests.ledger.samples import claim, entry, order, step

LIFE: list[Fact] = [Dispatched(), Progressed(progress=Progress("on")), Completed(result={})]


def acknowledged(operation: Operation, key: str) -> None:
    print(operation.id, operation.sequence, key, flush=True)


async def write(ledger: Ledger, kind: OperationKind, name: str) -> None:
    number = 0
    while True:
        number += 1
        key = f"{name}-{number}"
        try:
            accepted = await ledger.operations.accept(order(kind), key=claim(key), audit=entry())
        except EngineBusy:
            # Of an earlier child that was killed, and nobody is there to end it.
            await asyncio.sleep(0.01)
            continue
        now = accepted.operation
        acknowledged(now, key)
        facts: list[Fact] = [
            Dispatched(),
            Progressed(progress=Progress("on")),
            Completed(result={}),
        ]
        for fact in facts:
            now = await ledger.operations.record(now, step(now, fact), audit=entry("step"))
            acknowledged(now, key)


async def main(url: str, number: str) -> None:
    ledger = await Ledger.open(url, clock=SystemClock())
    assert await ledger.leases.acquire("e1", f"child-{number}", 3_600) is not None or (
        not url.startswith("sqlite")
    )
    print("ready", flush=True)
    await asyncio.gather(
        write(ledger, OperationKind.PAUSE, f"{number}-x"),
        *(write(ledger, OperationKind.ABORT_REQUESTS, f"{number}-{n}") for n in range(3)),
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
