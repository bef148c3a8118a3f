"""Which KV blocks belong to whom. Pure bookkeeping: no tensor, no clock.

A block is in one of three states: referenced by one or more sequences; idle, which means free but
still holding a known prefix that the next matching prompt may reuse; or blank. Blank and idle
blocks are both available; blank ones are handed out first, idle ones from the least recently used.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.reference_engine.cache_changes import (
    BlockRemoved,
    BlockStored,
    CacheChange,
    CacheCleared,
)


class BlockPoolError(Exception):
    """A caller broke the rules of the pool: a defect in the scheduler, never a caller's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCount:
    """``freed`` blocks held reusable prefixes and are blank now; ``in_use`` are referenced by live
    sequences: they keep their content, but no later prompt can match it any more."""

    freed: int
    in_use: int


def prefix_root(cache_salt: str, label: str = "") -> bytes:
    """Hash that chains of this salt start from, and of this ``label``: what stands for the adapter
    under which they are computed. Another salt or label can never match."""
    if not label:
        return hashlib.sha256(b"prefix\x00" + cache_salt.encode()).digest()
    # Of fixed length, so that no label and salt can be taken for another pair.
    labelled = hashlib.sha256(label.encode()).digest()
    return hashlib.sha256(b"adapter\x00" + labelled + cache_salt.encode()).digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block, which stands for its tokens and for all tokens before it.

    SHA-256, because a collision would serve one caller's context to another.
    """
    return hashlib.sha256(parent + struct.pack(f"!{len(token_ids)}I", *token_ids)).digest()


class BlockPool:
    """Blocks are numbered from 0. Not thread-safe: the scheduler alone holds it."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError("a pool needs at least one block")
        self._references = [0] * total
        self._hash_of: list[bytes | None] = [None] * total
        self._block_of: dict[bytes, int] = {}
        self._label_of: dict[int, str] = {}
        self._blank = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._generation = 0
        self._changes: list[CacheChange] = []

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` can hand out now."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks referenced by at least one sequence."""
        return self.total - self.available

    @property
    def idle(self) -> int:
        """Available blocks that hold a reusable prefix."""
        return len(self._idle)

    @property
    def generation(self) -> int:
        """Rises with each flush. Content of an earlier generation is never published."""
        return self._generation

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a chain, not yet referenced for the caller."""
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, blocks: Sequence[int]) -> None:
        """Reference blocks that :meth:`match` returned."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._idle:
                    raise BlockPoolError(f"block {block} holds nothing to share")
                del self._idle[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks for one new owner. Check :attr:`available` before."""
        if count > self.available:
            raise BlockPoolError(f"{count} blocks asked for, {self.available} available")
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each. The end of a chain becomes the first to be evicted, because
        it is worth nothing without what precedes it."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise BlockPoolError(f"block {block} is not referenced")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._blank.append(block)
                else:
                    self._idle[block] = None

    def take_changes(self) -> tuple[CacheChange, ...]:
        """What became of findable blocks since the last call, in order."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def publish(
        self,
        block: int,
        digest: bytes,
        generation: int,
        told: BlockStored | None = None,
        *,
        label: str = "",
    ) -> None:
        """Make a full, computed block findable. The first block of a digest keeps the name.
        ``told`` is what is said of it when it does become findable. ``label`` as of the chain's
        root, for :meth:`drop`."""
        if self._references[block] < 1:
            raise BlockPoolError(f"block {block} is not referenced")
        if generation != self._generation or digest in self._block_of:
            return
        if self._hash_of[block] is not None:
            raise BlockPoolError(f"block {block} is published already")
        self._hash_of[block] = digest
        self._block_of[digest] = block
        if told is not None:
            self._changes.append(told)
        if label:
            self._label_of[block] = label

    def drop(self, label: str) -> FlushCount:
        """Forget every prefix of one label; like :meth:`flush`, but the others stay."""
        mine = [block for block, known in self._label_of.items() if known == label]
        freed = 0
        for block in mine:
            self._forget(block)
            if block in self._idle:
                del self._idle[block]
                self._blank.append(block)
                freed += 1
        return FlushCount(freed=freed, in_use=len(mine) - freed)

    def flush(self) -> FlushCount:
        """Forget every prefix. Nothing computed before can be matched afterwards, also not what
        live sequences still go on to publish: they belong to the earlier generation."""
        freed = len(self._idle)
        self._blank.extend(self._idle)
        self._idle.clear()
        self._block_of.clear()
        self._label_of.clear()
        self._hash_of = [None] * self.total
        self._generation += 1
        self._changes.append(CacheCleared())
        return FlushCount(freed=freed, in_use=self.used)

    def _forget(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            del self._block_of[digest]
            self._hash_of[block] = None
            self._changes.append(BlockRemoved(digest.hex()))
            self._label_of.pop(block, None)
