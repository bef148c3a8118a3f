"""How ranks are told to hand the KV of a prompt out, or to take it in. Frozen values, no torch.

Each rank writes and reads a part of its own: the keys, then the values, of its heads, as float32 in
the order [layer, head, token, dimension]. A part lies in a file of memory that the front end made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartFile:
    """Where a rank's part is. A path can come to mean another file; with its inode it can not."""

    path: str
    inode: int


@dataclass(frozen=True, slots=True)
class KvSource:
    """KV of ``tokens`` positions from the first one on: the ``parts``, and what stands for the
    ``weights`` with which each was computed, in rank order."""

    parts: tuple[PartFile, ...]
    weights: tuple[str, ...]
    tokens: int


# ---- orders ----


@dataclass(frozen=True, slots=True)
class DeliverKv:
    """For a request that was submitted to wait for it. Refused when the rank's weights are others
    than those of the source: KV of other weights is never decoded."""

    request_id: str
    source: KvSource


@dataclass(frozen=True, slots=True)
class CollectKv:
    """What a rank wrote for a request whose prompt is computed. Can be asked once."""

    request_id: str


# ---- results ----


@dataclass(frozen=True, slots=True)
class KvDelivered:
    """``taken`` False: the request has ended meanwhile."""

    taken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KvWritten:
    """``weights`` stands for those of the rank, with the adapter, that computed all of it: without
    an adapter their sha256 in hex."""

    bytes: int
    sha256: str
    weights: str


# ---- parts of a step ----


@dataclass(frozen=True, slots=True)
class KvImport:
    """Before the step: KV from ``source`` into ``blocks``. ``adapter`` is the number of the one
    that the request uses; 0: none."""

    source: KvSource
    blocks: tuple[int, ...]
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class KvExport:
    """After the step: the first ``tokens`` positions of ``blocks`` to each rank's part, computed
    under ``adapter``."""

    request_id: str
    parts: tuple[PartFile, ...]
    tokens: int
    blocks: tuple[int, ...]
    adapter: int = 0
