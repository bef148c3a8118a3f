"""What the front end and a process that receives weights say to each other. No torch.

The process joins a trainer's group with one member for each of the engine's ranks, and puts what is
broadcast into shared memory, from where each rank takes its part. It is a process of its own since
the library ends the one it runs in when a sender is wrong about a tensor's size, and lets nobody
interrupt a wait for a peer; a process can be killed, and then nothing is left of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.reference_engine.change_orders import SharedTensor


class GroupBackend(StrEnum):
    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinGroup:
    """The engine's rank r is member ``rank_offset`` + r of ``world_size``; ``source_rank`` is the
    member that sends. ``address`` is numeric. ``patience_s`` bounds each wait in the process,
    should nobody end it sooner."""

    backend: GroupBackend
    address: str
    port: int
    world_size: int
    rank_offset: int
    source_rank: int
    group: str
    ranks: int
    patience_s: float


@dataclass(frozen=True, slots=True)
class ReceiveTensors:
    """In the order in which they are broadcast, to their places in the file at ``path``."""

    path: str
    tensors: tuple[SharedTensor, ...]


class MemberStep(StrEnum):
    LOOKING = "looking"  # for the store at which the members find each other
    CONNECTED = "connected"  # to it
    JOINED = "joined"


@dataclass(frozen=True, slots=True)
class MemberIs:
    rank: int
    step: MemberStep


@dataclass(frozen=True, slots=True)
class TensorIsHere:
    """``index`` within the tensors of the order that is being carried out."""

    rank: int
    index: int


@dataclass(frozen=True, slots=True)
class TensorsReceived:
    """By every member, and they all received the same bytes."""


@dataclass(frozen=True, slots=True)
class TransferHalted:
    """``rank`` of the engine that noticed first; ``tensor`` empty: before the first one. The
    process does nothing more."""

    rank: int
    tensor: str
    cause: str


TransferOrder = JoinGroup | ReceiveTensors
TransferReport = MemberIs | TensorIsHere | TensorsReceived | TransferHalted
