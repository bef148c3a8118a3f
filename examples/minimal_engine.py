"""An engine that says its prompt over and over, administered like any other.

python examples/minimal_engine.py DATA_DIR [INFERENCE_ADDRESS ADMIN_ADDRESS]
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from app.domain.capabilities import Capabilities
from app.domain.commands import Command, FlushCaches
from app.domain.kinds import CacheKind, OperationKind
from app.enginekit.in_flight import RequestEnded
from app.enginekit.runtime import Conclusion, EngineDescription, Flushed
from app.enginekit.server import EngineServer, KitSettings
from app.enginekit.simple_runtime import SimpleRuntime
from app.rpc.openengine.v1 import generation_pb2 as pb


class SayAgain(SimpleRuntime):
    weight_version = "v1"

    def __init__(self) -> None:
        super().__init__()
        self.cached: set[str] = set()

    def describe(self) -> EngineDescription:
        return EngineDescription(
            name="say-again", version="1", models=("echo",), max_output_tokens=4096
        )

    def capabilities(self) -> Capabilities:
        can = super().capabilities()
        return replace(
            can,
            operations=can.operations | {OperationKind.FLUSH_CACHES},
            cache_kinds=frozenset({CacheKind.PREFIX}),
        )

    async def carry_out(self, command: Command) -> Conclusion:
        assert isinstance(command, FlushCaches)  # nothing else is offered
        freed, self.cached = len(self.cached), set()
        flushed = (Flushed(CacheKind.PREFIX, blocks_freed=freed, blocks_in_use=0),)
        return Conclusion(changed=freed > 0, flushed=flushed)

    async def generate(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        prompt = request.prompt or " ".join(str(number) for number in request.token_ids.ids)
        words = prompt.split() or ["…"]
        end = pb.GenerationFinished(reason=pb.FINISH_REASON_LENGTH)
        with self.requests.running(request.request_id) as mine:
            try:
                for word in islice(cycle(words), request.stopping.max_tokens or 16):
                    await asyncio.sleep(0.005)  # where a model would work
                    await mine.turn()
                    said = pb.TokenInfo(token_id=words.index(word))
                    token = pb.TokenOutput(tokens=[said], text=f"{word} ")
                    yield pb.GenerateResponse(request_id=request.request_id, token=token)
                self.cached.add(prompt)
            except RequestEnded as ended:
                end.reason, end.message = pb.FINISH_REASON_CANCELLED, ended.message
            yield pb.GenerateResponse(request_id=request.request_id, finished=end)


async def main(folder: str, inference: str = "127.0.0.1:0", admin: str = "127.0.0.1:0") -> None:
    settings = KitSettings(
        data_dir=Path(folder),
        inference_address=inference,
        admin_address=admin,
        insecure_loopback=True,  # no tokens: for this machine alone
    )
    server = EngineServer(SayAgain(), settings)
    await server.start()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    print(f"inference {server.inference_address} admin {server.admin_address}", flush=True)
    await stopped.wait()
    await server.stop(grace_s=1)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
