"""Weights from one division among ranks to another: the same as if they had been read anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.reference_engine.config import read_config
from app.reference_engine.errors import CheckpointError, OrderRefused
from app.reference_engine.holding import Holding
from app.reference_engine.host_memory import sha256_of
from app.reference_engine.limits import CoreSettings
from app.reference_engine.memory_file import memory_files
from app.reference_engine.model import KvCache, Llama
from app.reference_engine.shape_orders import LiveWeights, WriteWeights
from app.reference_engine.sharding import Cut, Layout
from app.reference_engine.weight_parts import gather, pieces_of, writing
from app.reference_engine.weights import load_part

SIZES = (1, 2, 4)
BLOCK = CoreSettings().block_size


def holding_of(layout: Layout, weights: dict[str, Tensor] | None) -> Holding:
    device = torch.device("cpu")
    bare = Llama(layout.config, None, 64, layout=layout, device=device)
    return Holding(bare, weights, lambda: KvCache(layout.local, 2, BLOCK, device))


@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("after", SIZES)
def test_every_division_from_every_other(tiny: Path, before: int, after: int) -> None:
    config = read_config(tiny)
    with memory_files(before) as paths:
        sums = []
        for rank in range(before):
            layout = Layout(config, rank, before)
            holding = holding_of(layout, load_part(tiny, layout))
            written = writing(holding, WriteWeights(paths))()
            assert written.bytes == Path(paths[rank]).stat().st_size
            sums.append(written.sha256)
        live = LiveWeights(paths, tuple(sums))
        for rank in range(after):
            layout = Layout(config, rank, after)
            found, expected = gather(live, layout), load_part(tiny, layout)
            assert list(found) == list(expected)
            assert sha256_of(found) == sha256_of(expected)
            assert all(one.is_contiguous() for one in found.values())


def test_parts_that_are_not_what_was_served_are_refused_by_some_new_rank(tiny: Path) -> None:
    config = read_config(tiny)
    with memory_files(2) as paths:
        sums = []
        for rank in range(2):
            layout = Layout(config, rank, 2)
            holding = holding_of(layout, load_part(tiny, layout))
            sums.append(writing(holding, WriteWeights(paths))().sha256)
        with open(paths[1], "r+b") as part:
            part.seek(-4, 2)
            part.write(b"\0\0\x80\x3f")
        with pytest.raises(CheckpointError, match="rank 1"):
            gather(LiveWeights(paths, tuple(sums)), Layout(config))


def test_weights_that_changed_behind_everybodys_back_are_not_handed_on(tiny: Path) -> None:
    layout = Layout(read_config(tiny))
    weights = load_part(tiny, layout)
    holding = holding_of(layout, weights)
    with memory_files(1) as paths:
        next(iter(weights.values()))[0, 0] += 1.0
        with pytest.raises(OrderRefused, match="sha256"):
            writing(holding, WriteWeights(paths))()
        with pytest.raises(OrderRefused, match="not there"):
            writing(holding_of(layout, None), WriteWeights(paths))
    with pytest.raises(OrderRefused, match="no memory"):
        writing(holding_of(layout, load_part(tiny, layout)), WriteWeights(paths))()


def test_pieces_of_parts_that_overlap() -> None:
    """Key-value heads that several ranks hold: each head is taken once."""
    shared = [Cut(0, 0, 4), Cut(0, 0, 4), Cut(0, 4, 8), Cut(0, 4, 8)]
    assert pieces_of((8, 3), None, shared) == [(0, Cut(0, 0, 4)), (2, Cut(0, 0, 4))]
    assert pieces_of((8, 3), Cut(0, 2, 6), shared) == [(0, Cut(0, 2, 4)), (2, Cut(0, 0, 2))]
    assert pieces_of((3,), None, [None, None]) == [(0, None)]
    assert pieces_of((8, 3), Cut(1, 1, 2), [None]) == [(0, Cut(1, 1, 2))]
