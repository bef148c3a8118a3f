"""A counting engine in a process of its own that waits when it is told to.

`python -m tests.robustness.held_engine FOLDER HISTORY NAME ADDRESS SEED DELAY_S` serves until it is
asked to stop. While `FOLDER/hold` is there, orders that have begun do not go on.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path

from app.domain.kinds import OperationKind
from app.enginekit.runtime import Order
from tests.doubles.engine import EngineDouble
from tests.e2e.processes import Process
from tests.robustness.counting_engine import CountingEngine, Recording, Watch, begin
from tests.robustness.history import Recorder

HOLD, READY = "hold", "ready.json"
_ROOT = Path(__file__).parents[2]
_LOOK_S = 0.005

# ---- in the engine's process ----


class HeldEngine(CountingEngine):
    def __init__(self, watch: Watch, chance: random.Random, delay_s: float, hold: Path) -> None:
        super().__init__(watch, chance, delay_s)
        cancellable = frozenset({OperationKind.PAUSE, OperationKind.FLUSH_CACHES})
        self.offered = replace(self.offered, cancellable=cancellable)
        self._hold = hold

    async def _step(self, phase: str, order: Order, rank: int) -> None:
        await super()._step(phase, order, rank)
        while phase == "prepare":
            if not self._hold.exists():
                return
            await asyncio.sleep(_LOOK_S)


async def _serve(folder: Path, history: Path, name: str, address: str, *more: str) -> None:
    seed, delay_s = more
    watch = Watch(name, Recorder(history))
    chance = random.Random(int(seed))
    double = EngineDouble(
        folder / "store",
        make_engine=lambda: HeldEngine(watch, chance, float(delay_s), folder / HOLD),
        interceptors=[Recording(watch)],
        admin_address=address,
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await begin(double, watch)
    aside = folder / "ready.coming"
    aside.write_text(json.dumps({"admin_address": double.admin_address}))
    aside.rename(folder / READY)
    await stop.wait()
    await double.kill()


# ---- in the test's process ----


class HeldEngineProcess:
    """`history`: a file that has begun."""

    def __init__(self, folder: Path, history: Path, name: str, seed: int, delay_s: float) -> None:
        folder.mkdir()
        self.name = name
        self._folder = folder
        self.address = ""
        arguments = [str(folder), str(history), name, "127.0.0.1:0", str(seed), str(delay_s)]
        command = (sys.executable, "-m", "tests.robustness.held_engine")
        self.process = Process(f"engine {name}", arguments, folder / "engine.log", _ROOT, command)

    def start(self) -> None:
        self.process.start()
        self.address = self.process.ready(self._folder / READY)["admin_address"]

    def hold(self) -> None:
        """Orders begin from now on, and do not go on."""
        (self._folder / HOLD).touch()

    def let_go(self) -> None:
        (self._folder / HOLD).unlink(missing_ok=True)


if __name__ == "__main__":
    folder, history, *rest = sys.argv[1:]
    asyncio.run(_serve(Path(folder), Path(history), *rest))
