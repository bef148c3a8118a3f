"""Run by Dynamo's own interpreter: one request to the worker, by its own plane.

.dynamo/env/bin/python tests/dynamo/asker.py 100 request_id=a lora=b
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from dynamo.runtime import DistributedRuntime


async def main(tokens: int, request: dict[str, Any]) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint("dynamo.backend.generate").client()
    await client.wait_for_instances()
    got = 0
    async for _ in await client.generate({"tokens": tokens, **request}):
        got += 1
    print(got, flush=True)
    runtime.shutdown()


if __name__ == "__main__":
    named = dict(word.split("=", 1) for word in sys.argv[2:])
    asyncio.run(main(int(sys.argv[1]), named))
