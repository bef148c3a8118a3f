"""The block pool: no block lost, none owned twice, no prefix matched that is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from app.reference_engine.kv_cache import BlockPool, BlockPoolError, chain_hash, prefix_root

TOTAL = 7


def label_of(digest: bytes) -> str:
    """As if a third of all chains were computed under each of two adapters."""
    return ("", "x", "y")[digest[0] % 3]


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share, publish and give back blocks; a plain model says who has what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.owners: list[tuple[int, list[int]]] = []  # (generation of admission, blocks)
        # What a block's content is: the digest it was written for by its latest writer.
        self.content: dict[int, bytes] = {}
        self.matchable: dict[bytes, int] = {}

    @rule(count=st.integers(1, TOTAL))
    def allocate(self, count: int) -> None:
        if count > self.pool.available:
            with pytest.raises(BlockPoolError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        for block in blocks:
            assert all(block not in owned for _, owned in self.owners), "owned twice"
            old = self.content.pop(block, None)
            if old is not None and self.matchable.get(old) == block:
                del self.matchable[old]
        self.owners.append((self.pool.generation, blocks))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        generation, blocks = data.draw(st.sampled_from(self.owners))
        block = data.draw(st.sampled_from(blocks))
        if block in self.content:
            return
        digest = data.draw(st.sampled_from([bytes([at]) for at in range(10)]))
        self.pool.publish(block, digest, generation, label=label_of(digest))
        if generation == self.pool.generation and digest not in self.matchable:
            self.content[block] = digest
            self.matchable[digest] = block

    @rule(digests=st.lists(st.sampled_from([bytes([at]) for at in range(10)]), max_size=5))
    def share(self, digests: list[bytes]) -> None:
        found = self.pool.match(digests)
        known = []
        for digest in digests:
            if digest not in self.matchable:
                break
            known.append(self.matchable[digest])
        assert found == known
        unique = list(dict.fromkeys(found))
        self.pool.acquire(unique)
        if unique:
            self.owners.append((self.pool.generation, unique))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.owners) - 1))
        _, blocks = self.owners.pop(at)
        self.pool.release(blocks)
        owned = {block for _, others in self.owners for block in others}
        for block in blocks:
            if block not in owned and block not in self.matchable.values():
                self.content.pop(block, None)

    @rule(label=st.sampled_from(["x", "y"]))
    def drop(self, label: str) -> None:
        owned = {block for _, blocks in self.owners for block in blocks}
        gone = {one: at for one, at in self.matchable.items() if label_of(one) == label}
        count = self.pool.drop(label)
        kept = set(gone.values()) & owned
        assert (count.freed, count.in_use) == (len(gone) - len(kept), len(kept))
        for digest, block in gone.items():
            del self.matchable[digest], self.content[block]

    @rule()
    def flush(self) -> None:
        owned = {block for _, blocks in self.owners for block in blocks}
        idle = set(self.matchable.values()) - owned
        count = self.pool.flush()
        assert (count.freed, count.in_use) == (len(idle), len(owned))
        self.matchable.clear()
        self.content = {}

    @invariant()
    def nothing_is_lost(self) -> None:
        owned = Counter(block for _, blocks in self.owners for block in blocks)
        assert self.pool.used == len(owned)
        assert self.pool.used + self.pool.available == self.pool.total == TOTAL
        assert self.pool.idle == len(set(self.matchable.values()) - owned.keys())

    def teardown(self) -> None:
        for _, blocks in self.owners:
            self.pool.release(blocks)
        assert self.pool.available == TOTAL
        assert sorted(self.pool.allocate(TOTAL)) == list(range(TOTAL))


def test_the_pool_keeps_its_books_in_any_order() -> None:
    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=60, stateful_step_count=40)
    )


def test_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(4)
    old, young = pool.allocate(2), pool.allocate(2)
    for block, digest in zip(old + young, (b"a", b"b", b"c", b"d"), strict=True):
        pool.publish(block, digest, 0)
    pool.release(old)
    pool.release(young)
    assert pool.allocate(1) == [old[1]]
    assert pool.match([b"a", b"b"]) == [old[0]]
    assert pool.match([b"c", b"d"]) == young


def test_blank_blocks_are_used_before_a_prefix_is_given_up() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a", 0)
    pool.release([block])
    pool.allocate(2)
    assert pool.match([b"a"]) == [block]


def test_what_was_computed_before_a_flush_is_never_found_after_it() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], b"a", pool.generation)
    admitted = pool.generation
    assert pool.flush().in_use == 2
    assert pool.match([b"a"]) == []
    pool.publish(blocks[1], b"b", admitted)
    assert pool.match([b"b"]) == []
    pool.release(blocks)
    assert pool.idle == 0


def release_unowned(pool: BlockPool) -> None:
    pool.release([0])


def publish_unowned(pool: BlockPool) -> None:
    pool.publish(0, b"a", 0)


def acquire_blank(pool: BlockPool) -> None:
    pool.acquire([0])


def publish_twice(pool: BlockPool) -> None:
    (block,) = pool.allocate(1)
    pool.publish(block, b"a", 0)
    pool.publish(block, b"b", 0)


@pytest.mark.parametrize("misuse", [release_unowned, publish_unowned, acquire_blank, publish_twice])
def test_misuse_is_told(misuse: Callable[[BlockPool], None]) -> None:
    with pytest.raises(BlockPoolError):
        misuse(BlockPool(2))


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


def test_chains_differ_by_salt_by_adapter_by_position_and_by_what_came_before() -> None:
    plain, salted = prefix_root(""), prefix_root("tenant")
    first = chain_hash(plain, (1, 2))
    digests = {
        first,
        chain_hash(salted, (1, 2)),
        chain_hash(plain, (1, 3)),
        chain_hash(first, (1, 2)),
        chain_hash(plain, (1,)),
        chain_hash(prefix_root("", "tenant"), (1, 2)),
        chain_hash(prefix_root("tenant", "a"), (1, 2)),
        chain_hash(prefix_root("a", "tenant"), (1, 2)),
    }
    assert len(digests) == 8
