"""Orders that change what the ranks hold, and their results: release, restore, update of weights
(those about adapters are in ``adapter_orders``).

Each goes its way in four entries of the log. Prepare does all that takes long or can fail, beside
what is live and while requests go on. Commit moves references, between two steps. Settle makes it
final: only now is the earlier state given up, and its memory returned. Undo instead of settle leads
back, from wherever the change is. Between commit and settle or undo no step is computed, so that
ranks that differ for a moment never compute together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.reference_engine.adapter_orders import AdapterPreparation


class Resource(StrEnum):
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


# ---- where new weights come from ----


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file by its real path, links resolved; ``sha256`` of the whole file in hex,
    None: not checked."""

    path: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class DiskSource:
    files: tuple[WeightFile, ...]


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """``dtype`` as safetensors spells it, ``offset`` in bytes; row-major, little endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class SharedSource:
    """Tensors in one segment of shared memory (a file in /dev/shm) that belongs to ``owner``, a
    user id."""

    path: str
    owner: int
    tensors: tuple[SharedTensor, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """What was put beside the live weights before, piece by piece. ``files``: those that it was
    read from, if it was read from files alone."""

    files: tuple[WeightFile, ...] = ()


# ---- orders ----


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRelease:
    """``preserve``: the content is copied to host memory, and restore brings it back."""

    change_id: str
    resources: tuple[Resource, ...]
    preserve: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRestore:
    change_id: str
    resources: tuple[Resource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareUpdate:
    """``flush``: with the commit, KV of the earlier weights is given up; live requests compute
    theirs again. ``check_finite``: refuse values that are not finite numbers."""

    change_id: str
    source: DiskSource | SharedSource | Pieces
    flush: bool
    check_finite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePiece:
    """A part of the tensors of an update, to be kept beside the live weights until PrepareUpdate
    makes a whole of all parts. The first one begins the change; ``index`` 0, 1, 2 …"""

    change_id: str
    index: int
    sources: tuple[DiskSource | SharedSource, ...]
    check_finite: bool = False


@dataclass(frozen=True, slots=True)
class CommitChange:
    change_id: str


@dataclass(frozen=True, slots=True)
class UndoChange:
    change_id: str


@dataclass(frozen=True, slots=True)
class SettleChange:
    change_id: str


Preparation = PrepareRelease | PrepareRestore | PrepareUpdate | AdapterPreparation
BesideSteps = Preparation | StagePiece  # carried out in a thread of its own
ChangeOrder = BesideSteps | CommitChange | UndoChange | SettleChange


# ---- results ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePrepared:
    """Of an update or an adapter: this rank's part, and ``read``, which stands for the very bytes
    that were read (the ranks' must be equal). Otherwise zeros."""

    tensors: int = 0
    bytes: int = 0
    sha256: str = ""
    read: str = ""


@dataclass(frozen=True, slots=True)
class PieceStaged:
    """``tensors``: how many there are of all pieces so far."""

    tensors: int


@dataclass(frozen=True, slots=True)
class SwitchedAt:
    """A live request had so many output tokens, at least one, when the weights under it changed."""

    request_id: str
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeCommitted:
    """From the first rank; the others' are empty."""

    switched: tuple[SwitchedAt, ...] = ()
    blocks_freed: int = 0


@dataclass(frozen=True, slots=True)
class ChangeUndone:
    """``weights_sha256``: of the live weights, computed again from their bytes; empty: none."""

    weights_sha256: str


@dataclass(frozen=True, slots=True)
class ResourceBytes:
    """What the tensors of one resource measured before the change and measure after it."""

    resource: Resource
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSettled:
    """Memory in bytes. On the CPU ``…_memory`` is the process's resident set, on a CUDA device what
    its allocator has reserved; ``held`` what the tensors of the order's resources measured
    before, ``parts`` what those of each do; ``kept`` the copies in host memory, which the resident
    set does not contain."""

    before_memory: int
    after_memory: int
    held: int
    kept: int
    weights_sha256: str
    parts: tuple[ResourceBytes, ...] = ()


ChangeResult = ChangePrepared | PieceStaged | ChangeCommitted | ChangeUndone | ChangeSettled
