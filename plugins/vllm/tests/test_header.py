"""A file is taken whole or not at all."""

from __future__ import annotations

import pytest
from chadburn_vllm.header import Tensor, read_header
from chadburn_vllm.payload import Refused
from checkpoints import file_of, with_header

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def read(data: bytes) -> dict[str, Tensor]:
    return read_header(memoryview(data), "x.safetensors")


def test_names_forms_and_places() -> None:
    data = file_of(
        {"one": ("BF16", [2, 3]), "none": ("F32", [0]), "scalar": ("I64", [])}, format="pt"
    )
    found = read(data)
    assert [(name, each.form) for name, each in found.items()] == [
        ("one", "BF16 [2, 3]"),
        ("none", "F32 [0]"),
        ("scalar", "I64 []"),
    ]
    assert {name: data[each.start : each.end] for name, each in found.items()} == {
        "one": bytes(12),
        "none": b"",
        "scalar": b"\2" * 8,
    }


@pytest.mark.parametrize("cut", [0, 7, 8, 30, -1])
def test_a_file_that_is_cut_off(cut: int) -> None:
    with pytest.raises(Refused, match=r"x\.safetensors"):
        read(file_of({"one": ("F32", [4])})[:cut])


def test_a_file_with_more_behind_it() -> None:
    with pytest.raises(Refused, match="its header speaks of"):
        read(file_of({"one": ("F32", [4])}) + b"\0")


@pytest.mark.parametrize(
    "entry",
    [
        None,
        GOOD | {"dtype": "F4"},
        GOOD | {"dtype": None},
        GOOD | {"shape": [-2]},
        GOOD | {"shape": [True, 2]},
        GOOD | {"shape": "2"},
        GOOD | {"shape": [3]},
        GOOD | {"data_offsets": [0]},
        GOOD | {"data_offsets": [8, 0]},
        GOOD | {"data_offsets": [8, 16]},
    ],
)
def test_an_entry_that_does_not_add_up(entry: object) -> None:
    with pytest.raises(Refused, match=r"x\.safetensors: .*\bone\b"):
        read(with_header({"one": entry}, bytes(8)))


def test_tensors_that_share_bytes() -> None:
    with pytest.raises(Refused, match="do not follow"):
        read(with_header({"one": GOOD, "two": GOOD}, bytes(8)))


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff", b'{"a": 1, "a": 1}'])
def test_a_header_that_is_no_object(text: bytes) -> None:
    with pytest.raises(Refused, match="no safetensors file"):
        read(len(text).to_bytes(8, "little") + text)


def test_a_header_of_an_absurd_length() -> None:
    with pytest.raises(Refused, match="no whole safetensors file"):
        read((1 << 60).to_bytes(8, "little") + b"{}")
