"""Which files of a checkpoint hold its weights. No torch: the front end asks too."""

from __future__ import annotations

from pathlib import Path

from app.reference_engine.config import read_json
from app.reference_engine.errors import CheckpointFileInvalid, CheckpointFileMissing

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def safetensors_files(directory: Path) -> tuple[Path, ...]:
    """The files that hold the weights: those an index names, else the single one."""
    index = directory / _INDEX
    if not index.exists():
        single = directory / _SINGLE
        if not single.is_file():
            raise CheckpointFileMissing(single)
        return (single,)
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointFileInvalid(index, "no weight_map")
    files = []
    for name in sorted(set(map(str, shard_of.values()))):
        # An index is data from outside: it must not reach files beside the checkpoint.
        if Path(name).name != name:
            raise CheckpointFileInvalid(index, f"shard name {name!r} is not a plain file name")
        if not (directory / name).is_file():
            raise CheckpointFileMissing(directory / name)
        files.append(directory / name)
    return tuple(files)
