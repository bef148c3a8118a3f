"""Cache events of the real engine: a subscriber knows what the next prompt will find."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.conformance.cache_view import CacheView
from app.reference_engine.kv_cache import chain_hash, prefix_root
from app.reference_engine.limits import CoreSettings
from app.reference_engine.serving import EngineSettings, ServedEngine, served
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import generation_pb2, kv_pb2
from tests.reference_engine.calling import Clients, clients_of
from tests.reference_engine.ranks import nursery
from tests.reference_engine.serving import PATIENCE_S

pytestmark = pytest.mark.anyio

SIZE = 4
WORDS = tuple(3 + number * 37 % 200 for number in range(200))


def settings(checkpoint: Path, data_dir: Path) -> EngineSettings:
    # Few blocks: prompts push each other out.
    core = CoreSettings(torch_threads=1, block_size=SIZE, kv_blocks=64, max_model_len=128)
    return EngineSettings(
        nursery=nursery(),
        data_dir=data_dir,
        checkpoint=checkpoint,
        insecure_loopback=True,
        core=core,
        stop_grace_s=0,
    )


@pytest.fixture(scope="module")
async def engine(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServedEngine]:
    async with served(settings(tiny, tmp_path_factory.mktemp("engine"))) as running:
        yield running


@pytest.fixture
async def clients(engine: ServedEngine) -> AsyncIterator[Clients]:
    """Every test leaves an open engine and an empty cache."""
    async with clients_of(engine) as connected:
        yield connected
        await connected.flush()


class Subscriber:
    """Reads in the background, from a snapshot on."""

    def __init__(self, clients: Clients) -> None:
        self.view = CacheView()
        self.error: Any = None
        request = kv_pb2.SubscribeKvEventsRequest(include_snapshot=True)
        self._rpc = clients.control.SubscribeKvEvents(request, timeout=PATIENCE_S)
        self._moved = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for told in self._rpc:
            async with self._moved:
                if told.HasField("batch"):
                    self.view.take(told.batch)
                else:
                    self.error = told.error
                self._moved.notify_all()

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(PATIENCE_S), self._moved:
            await self._moved.wait_for(holds)

    async def stop(self) -> None:
        self._rpc.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def generated(clients: Clients, tokens: tuple[int, ...], salt: str = "") -> int:
    """Prompt tokens that came out of the cache."""
    request = generation_pb2.GenerateRequest(request_id=f"r{hash((tokens, salt))}")
    request.token_ids.ids.extend(tokens)
    request.stopping.max_tokens = 1
    if salt:
        request.kv.cache_salt = salt
    heard = await clients.send(request).whole()
    assert heard.finished is not None, heard
    return heard.cached


async def test_the_view_foretells_what_is_cached(clients: Clients) -> None:
    subscriber = Subscriber(clients)
    prompts = [WORDS[start : start + 80] for start in (0, 20, 0, 40, 20, 60, 0)]
    for prompt in [*prompts, prompts[0][:40] + prompts[3][:20]]:
        # The changes are told before the answer ends, and read by another connection.
        await caught_up(clients, subscriber)
        foretold = subscriber.view.chain(prompt[: (len(prompt) - 1) // SIZE * SIZE])
        assert await generated(clients, prompt) == foretold
    await caught_up(clients, subscriber)
    assert 0 < len(subscriber.view.blocks) <= 64
    hashed = {
        chain_hash(one.parent or prefix_root(""), one.token_ids): key
        for key, one in subscriber.view.blocks.items()
    }
    assert all(digest == key for digest, key in hashed.items())
    await subscriber.stop()


async def caught_up(clients: Clients, subscriber: Subscriber) -> None:
    """A fresh snapshot says how far the feed is; the older subscriber has to get there too, and to
    the same blocks."""
    fresh = Subscriber(clients)
    await fresh.until(lambda: fresh.view.last)
    await subscriber.until(lambda: subscriber.view.last >= fresh.view.last)
    assert subscriber.view.blocks == fresh.view.blocks
    await fresh.stop()


async def test_salted_prefixes_are_marked(clients: Clients) -> None:
    subscriber = Subscriber(clients)
    words = WORDS[:20]
    await generated(clients, words, salt="tenant")
    await subscriber.until(lambda: len(subscriber.view.blocks) == 5)
    root = prefix_root("tenant").hex()
    assert {one.extra for one in subscriber.view.blocks.values()} == {(root,)}
    assert "tenant" not in str(subscriber.view)
    await subscriber.stop()


async def test_what_empties_the_cache_is_told(clients: Clients) -> None:
    subscriber = Subscriber(clients)
    words = WORDS[:40]

    async def filled() -> None:
        await generated(clients, words)
        await subscriber.until(lambda: len(subscriber.view.blocks) == 10)

    await filled()
    await clients.flush()
    await subscriber.until(lambda: not subscriber.view.blocks)
    await filled()
    kinds = (pb.RESOURCE_KIND_KV_CACHE,)
    await clients.release(*kinds, content=pb.CONTENT_POLICY_DISCARD).completed()
    await subscriber.until(lambda: not subscriber.view.blocks)
    await clients.restore(*kinds)
    await clients.resume()
    await filled()
    # Preserved, it is there again, and so nothing was to be told.
    before = subscriber.view.last
    await clients.release(*kinds, content=pb.CONTENT_POLICY_PRESERVE).completed()
    await clients.restore(*kinds)
    await clients.resume()
    assert await generated(clients, words) == 36
    await caught_up(clients, subscriber)
    assert subscriber.view.last == before
    await subscriber.stop()


async def test_with_the_ranks_the_cache_is_gone(tiny: Path, tmp_path: Path) -> None:
    async with served(settings(tiny, tmp_path)) as engine, clients_of(engine) as clients:
        subscriber = Subscriber(clients)
        await generated(clients, WORDS[:40])
        await subscriber.until(lambda: len(subscriber.view.blocks) == 10)
        os.kill(engine.rank_pids[0], signal.SIGKILL)
        await subscriber.until(lambda: not subscriber.view.blocks)
        await subscriber.stop()
