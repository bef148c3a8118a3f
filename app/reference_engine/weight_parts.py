"""One rank's weights out of the ranks' live ones: written by each, gathered for another division.

See ``shape_orders`` for what a part looks like.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.reference_engine.errors import CheckpointFileInvalid, OrderRefused
from app.reference_engine.holding import Holding
from app.reference_engine.host_memory import bytes_of, sha256_of
from app.reference_engine.shape_orders import LiveWeights, WeightsWritten, WriteWeights
from app.reference_engine.sharding import Cut, Layout
from app.reference_engine.tensor_files import Entry, TensorFile
from app.reference_engine.weights import expected_shapes

_WORD, _SIZE = "F32", 4


def writing(holding: Holding, order: WriteWeights) -> Callable[[], WeightsWritten]:
    """What is to be run, in a thread or here, to write the live weights. Raises OrderRefused, also
    from what it returns."""
    held = holding.held
    if held.model is None:
        raise OrderRefused("the weights are not there")
    weights = held.model.weights
    path = order.paths[holding.bare.layout.rank]

    def work() -> WeightsWritten:
        sha256 = sha256_of(weights)
        if sha256 != held.sha256:
            raise OrderRefused(f"the live weights have sha256 {sha256}, not {held.sha256}")
        try:
            with open(path, "r+b", buffering=0) as part:
                for name in expected_shapes(holding.config):
                    raw: Any = weights[name].cpu().contiguous().view(-1).view(torch.uint8).numpy()
                    _write(part.fileno(), memoryview(raw))
        except OSError as error:
            raise OrderRefused(f"no memory for a copy ({error.strerror})") from error
        return WeightsWritten(bytes=bytes_of(weights), sha256=sha256)

    return work


def gather(live: LiveWeights, layout: Layout) -> dict[str, Tensor]:
    """The part of ``layout``, complete. The new ranks share the checksums of the old parts among
    themselves: together they have looked at every byte. Raises CheckpointError."""
    size = len(live.paths)
    before = [Layout(layout.config, rank, size) for rank in range(size)]
    places = [_places(one) for one in before]
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(Path(path))) for path in live.paths]
        for rank in range(layout.rank, size, layout.world_size):
            part = {name: files[rank].tensor(entry) for name, entry in places[rank].items()}
            if sha256_of(part) != live.sha256[rank]:
                raise CheckpointFileInvalid(files[rank].path, f"not what rank {rank} served")
        weights = {}
        for name, shape in expected_shapes(layout.config).items():
            wanted = layout.cut(name)
            cuts = [one.cut(name) for one in before]
            dim = next((cut.dim for cut in (wanted, *cuts) if cut is not None), 0)
            pieces = [
                files[rank].tensor(places[rank][name], cut)
                for rank, cut in pieces_of(shape, wanted, cuts)
            ]
            weights[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return weights


def pieces_of(
    shape: tuple[int, ...], wanted: Cut | None, cuts: Sequence[Cut | None]
) -> list[tuple[int, Cut | None]]:
    """Where a part of a tensor of that shape lies, first piece first: a rank and what of that
    rank's own part. ``cuts`` per rank; None is all of the tensor, and then all ranks have it."""
    whole = cuts[0]
    if whole is None:
        return [(0, wanted)]
    dim = whole.dim
    at, stop = (wanted.start, wanted.stop) if wanted is not None else (0, shape[dim])
    found: list[tuple[int, Cut | None]] = []
    while at < stop:
        # Several ranks may have it: key-value heads are shared where there are few.
        rank, cut = next(
            (rank, cut)
            for rank, cut in enumerate(cuts)
            if cut is not None and cut.start <= at < cut.stop
        )
        upto = min(stop, cut.stop)
        found.append((rank, Cut(dim, at - cut.start, upto - cut.start)))
        at = upto
    return found


def _places(layout: Layout) -> dict[str, Entry]:
    """Where each tensor lies in the part of that rank."""
    found, at = {}, 0
    for name, shape in expected_shapes(layout.config).items():
        cut = layout.cut(name)
        local = shape if cut is None else cut.of(shape)
        length = math.prod(local) * _SIZE
        found[name] = Entry(_WORD, local, at, length)
        at += length
    return found


def _write(fd: int, content: memoryview) -> None:
    while content:
        content = content[os.write(fd, content[: 1 << 30]) :]
