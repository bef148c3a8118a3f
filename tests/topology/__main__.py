"""make topology: the deployment of docs/deployment.md as plain processes, driven end to end.

    python -m tests.topology [--orders N] [--proxy nginx|caddy]

N orders are between two steps of the rolling restart.

Prints what it saw, and ends with 0 if all of it was as promised; else with 1, and what was not.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.topology.course import Course
from tests.topology.plant import Plant, plant

ENGINES = ("torch-0", "torch-1")
LONGEST_S = 1200.0


async def drive(made: Plant, orders: int) -> None:
    course = Course(made, say, list(ENGINES))
    try:
        async with asyncio.timeout(LONGEST_S):
            await course.engines_are_found()
            await course.one_key_is_one_order()
            await course.a_stream_comes_as_it_happens()
            await course.begin_load(workers=2)
            await course.gateways_are_rolled(orders)
            await course.a_gateway_is_killed(orders)
            await course.an_engine_is_rolled(orders)
            await course.end_load()
            failures = await course.nothing_is_lost()
            # An engine that starts anew says so of what it had begun.
            assert set(failures) <= {"ENGINE_RESTARTED"}, failures
            await course.engines_agree()
            await course.a_broken_list_changes_nothing()
            await course.an_engine_leaves_and_comes_back()
    finally:
        await course.close()


def say(line: str) -> None:
    print(f"topology: {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--orders", type=int, default=40)
    parser.add_argument("--proxy", choices=("nginx", "caddy"), default="nginx")
    wanted = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cb-topology-", dir="/tmp") as folder:
        # The proxy's workers may run as somebody else.
        Path(folder).chmod(0o755)
        with plant(Path(folder), ENGINES, proxy=wanted.proxy) as made:
            say(f"started: PostgreSQL, issuer, {', '.join(ENGINES)}, two gateways, {wanted.proxy}")
            try:
                asyncio.run(drive(made, wanted.orders))
            except Exception:
                # What went wrong, and what the processes said, whatever it was.
                traceback.print_exc()
                print(made.said(), file=sys.stderr)
                say("FAILED")
                return 1
    say(f"all as promised, in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
