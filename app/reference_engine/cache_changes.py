"""What becomes of the blocks that a later prompt could find. Frozen values, no torch, no protobuf.

Hashes in hex. Only what is findable is told of: a block that is being filled, or that duplicates
another one's content, is nobody's business.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A full block can be found from now on. ``parent`` is the hash of the block before it, empty
    for the first of a chain. ``salt`` is the root of a salted chain, or of one that was computed
    under an adapter; empty for the common one. ``adapter`` is its number, 0: none."""

    digest: str
    parent: str
    token_ids: tuple[int, ...]
    request_id: str
    salt: str = ""
    adapter: int = 0
    adapter_name: str = ""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    digest: str


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing that was stored before can be found any more."""


CacheChange = BlockStored | BlockRemoved | CacheCleared


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """Of the first rank, whose scheduler decides for all; in the order in which it happened."""

    changes: tuple[CacheChange, ...]
