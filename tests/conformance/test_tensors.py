"""Weights as bytes: read, written, and damaged in one way at a time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.conformance.tensors import (
    DTYPES,
    Tensor,
    Weights,
    WeightsUnreadable,
    altered,
    misnamed,
    misshapen,
    mistyped,
    not_finite,
    parsed,
    read_weights,
    without_one,
    written,
)

FLOATS = [word for word, dtype in DTYPES.items() if dtype.nan]


@st.composite
def weights(draw: st.DrawFn) -> Weights:
    """With one matrix of floating point numbers at least, somewhere."""

    def tensor(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * DTYPES[dtype].size
        return Tensor(name, dtype, shape, draw(st.binary(min_size=size, max_size=size)))

    found = [
        tensor(name, draw(st.sampled_from(sorted(DTYPES))), tuple(draw(_SHAPES)))
        for name in sorted(draw(st.sets(_NAMES, max_size=4)))
    ]
    matrix = tensor("a matrix", draw(st.sampled_from(FLOATS)), (3, 2))
    found.insert(draw(st.integers(0, len(found))), matrix)
    return tuple(found)


_SHAPES = st.lists(st.integers(0, 3), max_size=3)
_NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@given(weights())
def test_what_is_written_is_read(tensors: Weights) -> None:
    assert tuple(parsed(written(tensors))) == tensors


@given(weights(), st.data())
def test_what_is_cut_off_is_never_read_as_whole(tensors: Weights, data: st.DataObject) -> None:
    raw = written(tensors)
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    try:
        read = parsed(cut)
    except (ValueError, KeyError, TypeError):
        return
    assert tuple(read) != tensors


@given(weights())
def test_each_damage_is_one_and_stays_well_formed(tensors: Weights) -> None:
    for damage in (misnamed, misshapen, mistyped, not_finite):
        damaged = damage(tensors)
        changed = [(a, b) for a, b in zip(tensors, damaged, strict=True) if a != b]
        assert len(changed) <= 1
        assert tuple(parsed(written(damaged))) == damaged
    assert len(without_one(tensors)) == len(tensors) - 1
    assert [t.name for t in misnamed(tensors)] != [t.name for t in tensors]
    assert [t.shape for t in misshapen(tensors)] != [t.shape for t in tensors]
    assert [t.dtype for t in mistyped(tensors)] != [t.dtype for t in tensors]


@given(weights())
def test_altered_weights_have_the_same_names_shapes_and_types(tensors: Weights) -> None:
    others = altered(tensors)
    assert [(t.name, t.shape, t.dtype, len(t.data)) for t in others] == [
        (t.name, t.shape, t.dtype, len(t.data)) for t in tensors
    ]
    assert altered(others) == tensors


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (None, "no safetensors files"),
        (b"", "holds no safetensors"),
        (b"\x02" + bytes(7) + b"[]", "holds no safetensors"),
        (b"\xff" * 64, "holds no safetensors"),
    ],
)
def test_what_is_no_checkpoint_is_said_to_be_none(
    raw: bytes | None, said: str, tmp_path: Path
) -> None:
    if raw is not None:
        (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(WeightsUnreadable, match=said):
        read_weights(tmp_path, at_most_bytes=1_000)


def test_more_than_the_suite_reads_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(written([Tensor("one", "U8", (9,), bytes(9))]))
    assert read_weights(file, at_most_bytes=1_000)[0].name == "one"
    with pytest.raises(WeightsUnreadable, match="more than"):
        read_weights(file, at_most_bytes=8)


def test_without_a_matrix_there_is_nothing_to_damage() -> None:
    with pytest.raises(WeightsUnreadable, match="matrix"):
        misshapen((Tensor("one", "I8", (2, 2), bytes(4)),))
