"""Headers of safetensors files that nobody should have written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.reference_engine.errors import CheckpointFileInvalid
from app.reference_engine.tensor_files import TensorFile

_ENTRY = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})


@pytest.mark.parametrize(
    "header",
    [
        f'{{"x": {_ENTRY}, "x": {_ENTRY}}}',
        '{"x": {"dtype": "F32", "shape": [1], "shape": [1], "data_offsets": [0, 4]}}',
        '{"x": ' * 100_000,
        "[" * 100_000,
        "[]",
        '{"x": 1}',
        '{"x": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}}',
        '{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
    ],
    ids=[
        "one tensor twice",
        "one shape twice",
        "deep objects",
        "deep lists",
        "no object",
        "no entry",
        "infinite shape",
        "negative shape",
        "before the file",
    ],
)
def test_headers_that_make_no_sense_name_the_file(tmp_path: Path, header: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"\0" * 4)
    with TensorFile(path) as file, pytest.raises(CheckpointFileInvalid, match=r"model\.safe"):
        file.entries()
