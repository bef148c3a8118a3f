"""Run by Dynamo's own interpreter: its runtime, and the double's worker behind it.

    .dynamo/env/bin/python tests/dynamo/worker.py vllm

Where the runtime listens, and which discovery it has, its own variables say.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo.runtime import DistributedRuntime

from tests.doubles.dynamo_model import Worker

ENDPOINT = "dynamo.backend"


async def main(kind: str) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint(f"{ENDPOINT}.generate")

    async def route(routed: bool) -> None:
        """Put back in the list of instances, or taken out of it, as a worker that sleeps is."""
        if routed:
            await endpoint.register_endpoint_instance()
        else:
            await endpoint.unregister_endpoint_instance()

    worker = Worker(kind, token_s=0.01, routing=route, odd=True)
    for name, callback in {**worker.callbacks(), **_for_tests(worker)}.items():
        runtime.register_engine_route(name, callback)

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        named = (str(request.get("request_id", "")), request.get("lora"))
        async for number in worker.generate(int(request["tokens"]), *named):
            if context.is_stopped():
                return
            yield {"token": number}

    def once(call: Any) -> Any:
        async def answers(request: Any) -> AsyncIterator[Any]:
            yield await call(request or {})

        return answers

    async def listed(_: Any) -> Any:
        return worker.listed()

    labels = [("model", "tiny")]
    serving = [endpoint.serve_endpoint(generate, graceful_shutdown=False, metrics_labels=labels)]
    if kind == "vllm":
        calls = {
            "load_lora": worker.load_lora, "unload_lora": worker.unload_lora, "list_loras": listed,
        }  # fmt: skip
        serving += [
            runtime.endpoint(f"{ENDPOINT}.{name}").serve_endpoint(once(call), metrics_labels=labels)
            for name, call in calls.items()
        ]
    await asyncio.gather(*serving)


def _for_tests(worker: Worker) -> dict[str, Any]:
    """What a test of another process sees and arranges for."""

    async def slow(_: Any) -> Any:
        await asyncio.sleep(0.5)
        worker.flushed += 1
        return {"status": "ok"}

    async def arrange(body: Any) -> Any:
        for name, value in body.items():
            setattr(worker, name, value)
        return {"status": "ok"}

    async def state(_: Any) -> Any:
        names = ("state", "paused", "level", "weights", "dead", "version", "flushed", "routed")
        told = {name: getattr(worker, name) for name in names}
        calls = [list(call) for call in worker.calls]
        return {**told, "requests": len(worker.requests), "calls": calls}

    return {"test/slow": slow, "test/arrange": arrange, "test/state": state}


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
