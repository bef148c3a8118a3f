"""What a subscriber of cache events knows: the blocks that a later prompt can find."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.conformance.case import expect
from app.rpc.openengine.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class Block:
    """`parent` empty: the first of its chain."""

    parent: bytes
    token_ids: tuple[int, ...]
    extra: tuple[str, ...]


@dataclass(slots=True)
class CacheView:
    """Applies batches. `last` is the number of the latest one, 0 within a snapshot and before
    anything."""

    blocks: dict[bytes, Block] = field(default_factory=dict)
    last: int = 0

    def take(self, batch: kv_pb2.KvEventBatch) -> None:
        """Raises NotHeld for what no cache can do."""
        number = batch.sequence_number
        if self.last:
            expect(number == self.last + 1, f"batch {self.last + 1}", f"batch {number}")
        self.last = number
        for event in batch.events:
            kind = event.WhichOneof("event")
            match kind:
                case "block_stored":
                    self._store(event.block_stored)
                case "block_removed":
                    for one in event.block_removed.block_hashes:
                        known = self.blocks.pop(one.value, None) is not None
                        expect(known, "a block removed that was stored", one.value.hex())
                case "all_blocks_cleared":
                    self.blocks.clear()
            expect(kind is not None, "an event that says what happened", "an empty one")

    def _store(self, stored: kv_pb2.BlockStored) -> None:
        size, hashes = stored.block_size, stored.block_hashes
        expect(size > 0, "block_size above 0", size)
        tokens = tuple(stored.token_ids)
        expect(
            len(tokens) == size * len(hashes),
            f"{size} tokens for each of {len(hashes)} blocks",
            f"{len(tokens)} tokens",
        )
        parent = stored.parent_block_hash.value
        for at, one in enumerate(hashes):
            expect(bool(one.value), "a hash for each block", "an empty one")
            expect(one.value not in self.blocks, "a block stored once", one.value.hex())
            extra = tuple(stored.extra_keys[at].values) if at < len(stored.extra_keys) else ()
            own = tokens[at * size : (at + 1) * size]
            self.blocks[one.value] = Block(parent, own, extra)
            parent = one.value

    def chain(self, token_ids: tuple[int, ...]) -> int:
        """How many of a prompt's tokens the view says to be cached, as whole blocks in a row."""
        following = {(block.parent, block.token_ids): key for key, block in self.blocks.items()}
        found, parent = 0, b""
        while True:
            sizes = {len(block.token_ids) for block in self.blocks.values()}
            key = next(
                (
                    following[parent, token_ids[found : found + size]]
                    for size in sizes
                    if (parent, token_ids[found : found + size]) in following
                ),
                None,
            )
            if key is None:
                return found
            found += len(self.blocks[key].token_ids)
            parent = key
