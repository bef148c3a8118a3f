"""What the ranks of one engine compute together: sums of partial results, and joined columns.

Every rank must make the same calls in the same order with the same shapes; the order log and the
step plans see to that.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everybody knows it by)
from torch import Tensor

from app.reference_engine.errors import PeerLost
from app.reference_engine.pulse import Pulse

# The front end watches the ranks and knows better than a timer here which of them is to blame.
_store: Any = dist.FileStore  # type: ignore[attr-defined] # not in its list of exports
_NEVER = dt.timedelta(days=365)


class Collective(Protocol):
    """The group as one rank sees it. Both calls raise PeerLost when another rank is gone."""

    @property
    def alone(self) -> bool:
        """Whether there is one rank only."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors, bit for bit the same on each, whatever their shape."""

    def join(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        """On the first rank: the columns of all ranks side by side, ``widths`` of each. On the
        others what they gave."""


class Alone:
    """A group of one."""

    alone = True

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def join(self, columns: Tensor, widths: Sequence[int]) -> Tensor:  # noqa: ARG002 (the port's)
        return columns


class RankGroup:
    """torch.distributed: gloo between CPUs, NCCL between CUDA devices."""

    alone = False

    def __init__(
        self, rank: int, world_size: int, rendezvous: Path, device: torch.device, pulse: Pulse
    ) -> None:
        """Returns when all ranks are there; the wait is bounded by the front end's start-up
        deadline. ``rendezvous`` is a file that does not exist yet, the same for all."""
        self._rank = rank
        self._size = world_size
        self._pulse = pulse
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=_store(str(rendezvous), world_size),
                rank=rank,
                world_size=world_size,
                timeout=_NEVER,
            )
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def sum(self, partial: Tensor) -> Tensor:
        partial = partial.contiguous()
        with self._pulse.waiting():
            try:
                if self._size == 2:
                    dist.all_reduce(partial)
                    return partial
                # A ring adds each element in an order that depends on its place in the tensor: a
                # token's result would change with its batch mates. Two numbers add alike either
                # way, more do not.
                parts = [torch.empty_like(partial) for _ in range(self._size)]
                dist.all_gather(parts, partial)
            except RuntimeError as error:
                raise PeerLost(str(error)) from error
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def join(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        widest = max(widths)
        padded = F.pad(columns, (0, widest - columns.shape[1])).contiguous()
        first = self._rank == 0
        parts = [torch.empty_like(padded) for _ in widths] if first else None
        with self._pulse.waiting():
            try:
                dist.gather(padded, parts, dst=0)
            except RuntimeError as error:
                raise PeerLost(str(error)) from error
        if parts is None:
            return columns
        cut = [part[:, :width] for part, width in zip(parts, widths, strict=True)]
        return torch.cat(cut, dim=1)
