"""What the scheduler says of its cache is what a prompt finds there."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from app.reference_engine.cache_changes import BlockRemoved, BlockStored, CacheCleared
from app.reference_engine.kv_cache import chain_hash, prefix_root
from tests.reference_engine.test_scheduler import ADAPTERS, World, prompts, request


class Replay:
    def __init__(self, world: World) -> None:
        self._world = world
        self.known: dict[bytes, BlockStored] = {}
        self.ever: set[bytes] = set()

    def catch_up(self) -> Collection[BlockStored]:
        """What can be found now."""
        for change in self._world.scheduler.cache_changes():
            match change:
                case BlockStored(digest=digest):
                    key = bytes.fromhex(digest)
                    assert key not in self.known, "stored twice"
                    self._check_content(change)
                    self.known[key] = change
                    self.ever.add(key)
                case BlockRemoved(digest=digest):
                    del self.known[bytes.fromhex(digest)]
                case CacheCleared():
                    self.known.clear()
        found = {key for key in self.ever if self._world.pool.match([key])}
        assert found == set(self.known)
        return self.known.values()

    @staticmethod
    def _check_content(stored: BlockStored) -> None:
        """Whoever knows the tokens and the salt can compute the hash."""
        root = bytes.fromhex(stored.salt) if stored.salt else prefix_root("")
        parent = bytes.fromhex(stored.parent) or root
        assert chain_hash(parent, stored.token_ids).hex() == stored.digest


@given(
    wanted=st.lists(
        st.tuples(
            prompts, st.integers(1, 12), st.sampled_from(["", "", "x"]), st.sampled_from(ADAPTERS)
        ),
        min_size=1,
        max_size=12,
    ),
    blocks=st.integers(8, 20),
    block_size=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
)
def test_replaying_the_changes_gives_the_cache(
    wanted: list[tuple[list[int], int, str, str]], blocks: int, block_size: int, seed: int
) -> None:
    """Through sharing, eviction, preemption, flushes, aborts, and adapters that go."""
    random = Random(seed)
    world = World(blocks=blocks * 4 // block_size, block_size=block_size, max_running=4)
    replay = Replay(world)
    for number, (prompt, max_tokens, salt, adapter) in enumerate(wanted):
        world.submit(request(f"r{number}", prompt, max_tokens, salt=salt, adapter=adapter))
        replay.catch_up()
        for _ in range(random.randrange(6)):
            if world.scheduler.runnable:
                world.step()
                replay.catch_up()
        match random.randrange(8):
            case 0:
                world.scheduler.flush()
            case 1:
                world.scheduler.recompute()
                world.scheduler.flush()
            case 3 if not world.scheduler.users_of(1):
                world.scheduler.drop(ADAPTERS[1])
                assert all(known.adapter != 1 for known in replay.catch_up())
            case 2 if world.scheduler.sequences():
                world.abort(world.scheduler.sequences()[0].request_id)
        replay.catch_up()
    while world.scheduler.runnable:
        world.step()
        replay.catch_up()
