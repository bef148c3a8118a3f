"""A change on one rank, in this process: stopped half-way, damaged, asked out of turn."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from app.reference_engine import change_orders as c
from app.reference_engine.assembly import build_rank
from app.reference_engine.errors import OrderRefused
from app.reference_engine.holding import Holding
from app.reference_engine.limits import CoreSettings
from app.reference_engine.sharding import LM_HEAD
from app.reference_engine.staging import Staging, Stopped

BOTH = (c.Resource.WEIGHTS, c.Resource.KV_CACHE)


@pytest.fixture
def holding(tiny: Path) -> Holding:
    return build_rank(tiny, CoreSettings(torch_threads=1, kv_blocks=8)).holding


def update(directory: Path, change_id: str = "u") -> c.PrepareUpdate:
    files = (c.WeightFile(str((directory / "model.safetensors").resolve())),)
    return c.PrepareUpdate(change_id=change_id, source=c.DiskSource(files), flush=True)


def test_undo_stops_a_preparation_that_still_runs(holding: Holding, tiny: Path) -> None:
    staging, before = Staging(holding), holding.held
    work = staging.begin(update(tiny))
    raised: list[Exception] = []

    def run() -> None:
        try:
            work()
        except OrderRefused as refusal:
            raised.append(refusal)

    running = threading.Timer(0.05, run)
    running.start()
    assert staging.undo("u").weights_sha256 == before.sha256
    running.join()
    assert isinstance(raised[0], Stopped)
    assert holding.held is before
    staging.begin(update(tiny))  # and the next one may come


def test_weights_that_are_not_what_they_were_are_not_called_rolled_back(
    holding: Holding, tiny: Path
) -> None:
    staging = Staging(holding)
    staging.begin(update(tiny))()
    assert holding.held.model is not None
    holding.held.model.weights[LM_HEAD][0, 0] += 1.0
    with pytest.raises(OrderRefused, match="live weights have sha256"):
        staging.undo("u")


def test_out_of_turn(holding: Holding, tiny: Path) -> None:
    staging = Staging(holding)
    for call in (staging.commit, staging.settle):
        with pytest.raises(OrderRefused, match="no such change"):
            call("u")
    assert staging.undo("u").weights_sha256 == holding.held.sha256
    work = staging.begin(update(tiny))
    with pytest.raises(OrderRefused, match="another change"):
        staging.begin(update(tiny, "v"))
    with pytest.raises(OrderRefused, match="not prepared"):
        staging.commit("u")
    work()
    with pytest.raises(OrderRefused, match="not committed"):
        staging.settle("u")
    staging.commit("u")
    with pytest.raises(OrderRefused, match="not prepared"):
        staging.commit("u")
    staging.settle("u")
    with pytest.raises(OrderRefused, match="not released"):
        staging.begin(c.PrepareRestore(change_id="r", resources=BOTH))


def test_undone_after_its_commit_a_release_never_was(holding: Holding) -> None:
    staging, before = Staging(holding), holding.held
    for preserve in (True, False):
        order = c.PrepareRelease(change_id="r", resources=BOTH, preserve=preserve)
        staging.begin(order)()
        staging.commit("r")
        assert not holding.able
        staging.undo("r")
        assert holding.held is before
        assert holding.able


def piece(directory: Path, index: int, change_id: str = "p") -> c.StagePiece:
    files = (c.WeightFile(str((directory / "model.safetensors").resolve())),)
    return c.StagePiece(change_id=change_id, index=index, sources=(c.DiskSource(files),))


def whole(change_id: str = "p") -> c.PrepareUpdate:
    return c.PrepareUpdate(change_id=change_id, source=c.Pieces(), flush=True)


def test_pieces_become_a_whole(holding: Holding, tiny: Path) -> None:
    staging, before = Staging(holding), holding.held
    staged = staging.begin(piece(tiny, 0))()
    assert isinstance(staged, c.PieceStaged)
    assert staged.tensors > 0
    assert holding.held is before
    with pytest.raises(OrderRefused, match="not prepared"):
        staging.commit("p")
    prepared = staging.begin(whole())()
    assert isinstance(prepared, c.ChangePrepared)
    assert prepared.sha256 == before.sha256
    with pytest.raises(OrderRefused, match="another change"):
        staging.begin(piece(tiny, 1))
    staging.commit("p")
    assert staging.settle("p").weights_sha256 == before.sha256


def test_pieces_out_of_turn(holding: Holding, tiny: Path) -> None:
    staging, before = Staging(holding), holding.held
    work = staging.begin(piece(tiny, 0))
    with pytest.raises(OrderRefused, match="not staged yet"):
        staging.begin(piece(tiny, 1))
    work()
    for other in (piece(tiny, 1, "q"), whole("q"), update(tiny, "p")):
        with pytest.raises(OrderRefused, match="another change"):
            staging.begin(other)
    with pytest.raises(OrderRefused, match="comes twice"):
        staging.begin(piece(tiny, 1))()
    assert staging.undo("p").weights_sha256 == before.sha256
    with pytest.raises(OrderRefused, match="no tensor"):
        staging.begin(whole("r"))()
    staging.undo("r")
    staging.begin(update(tiny))


def test_undo_stops_a_piece_that_still_runs(holding: Holding, tiny: Path) -> None:
    staging, before = Staging(holding), holding.held
    staging.begin(piece(tiny, 0))()
    work = staging.begin(piece(tiny, 1))
    raised: list[Exception] = []

    def run() -> None:
        try:
            work()
        except OrderRefused as refusal:
            raised.append(refusal)

    running = threading.Timer(0.05, run)
    running.start()
    assert staging.undo("p").weights_sha256 == before.sha256
    running.join()
    assert isinstance(raised[0], Stopped)
    assert holding.held is before
