"""Which files are read, and whose they may be."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from chadburn_vllm.checkpoint import INDEX, open_checkpoint
from chadburn_vllm.payload import Refused
from checkpoints import file_of, folder_of

ONE = {"one": ("F32", [4])}
TWO = {"two": ("BF16", [2, 2])}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


def opened(path: Path, root: Path) -> list[str]:
    return list(open_checkpoint(str(path), [str(root)]).tensors)


def test_one_file(root: Path) -> None:
    (root / "step.safetensors").write_bytes(file_of(ONE))
    assert opened(root / "step.safetensors", root) == ["one"]
    assert opened(root, root) == ["one"]


def test_a_folder_with_an_index(root: Path) -> None:
    folder = folder_of(root / "step", {"a.safetensors": ONE, "b.safetensors": TWO})
    (folder / "optimizer.safetensors").write_bytes(b"not looked at")
    assert opened(folder, root) == ["one", "two"]


def test_a_cache_that_keeps_files_elsewhere_below_the_root(root: Path) -> None:
    (root / "blobs").mkdir()
    (root / "blobs" / "0f9a").write_bytes(file_of(ONE))
    (root / "snapshot").mkdir()
    (root / "snapshot" / "model.safetensors").symlink_to(root / "blobs" / "0f9a")
    assert opened(root / "snapshot", root) == ["one"]
    assert opened(root / "snapshot" / "model.safetensors", root) == ["one"]


def test_nothing_outside_the_roots(root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(file_of(ONE))
    (root / "link.safetensors").symlink_to(secret)
    (root / "folder").symlink_to(tmp_path)
    (tmp_path / "weights-of-another").mkdir()
    for path in (
        secret,
        root / "link.safetensors",
        root / "folder",
        root / ".." / "secret.safetensors",
        tmp_path / "weights-of-another",
        tmp_path / "not-there",
        tmp_path,
    ):
        with pytest.raises(Refused, match="not below an allowed root"):
            opened(path, root)


def test_a_shard_outside_the_roots(root: Path, tmp_path: Path) -> None:
    folder = folder_of(root / "step", {"a.safetensors": ONE})
    (tmp_path / "a.safetensors").write_bytes(file_of(ONE))
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to(tmp_path / "a.safetensors")
    with pytest.raises(Refused, match="not below an allowed root"):
        opened(folder, root)


def test_a_pipe_holds_nobody_up(root: Path) -> None:
    os.mkfifo(root / "step.safetensors")
    with pytest.raises(Refused, match="no regular file"):
        opened(root / "step.safetensors", root)


def test_what_is_no_checkpoint(root: Path) -> None:
    (root / "weights.bin").write_bytes(b"")
    (root / "empty.safetensors").write_bytes(b"")
    (root / "none").mkdir()
    for path, said in {
        "weights.bin": "neither a folder nor",
        "empty.safetensors": "is empty",
        "none": "no .safetensors file",
        "gone.safetensors": "there is nothing at this path",
    }.items():
        with pytest.raises(Refused, match=said):
            opened(root / path, root)


def test_several_files_and_nothing_that_says_which(root: Path) -> None:
    for name in ("a", "b"):
        (root / f"{name}.safetensors").write_bytes(file_of(ONE))
    with pytest.raises(Refused, match=r"2 \.safetensors files"):
        opened(root, root)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "no weight_map"),
        ("[]", "no weight_map"),
        ('{"weight_map": 5}', "no weight_map"),
        ('{"weight_map": {}}', "no .safetensors file beside it"),
        ('{"weight_map": {"one": 5}}', "no .safetensors file beside it"),
        ('{"weight_map": {"one": "../a.safetensors"}}', "no .safetensors file beside it"),
        ('{"weight_map": {"one": "c.safetensors"}}', "c.safetensors can't be opened"),
        ('{"weight_map": {"other": "a.safetensors"}}', "differ in one, other"),
    ],
)
def test_an_index_that_does_not_fit(root: Path, index: str, said: str) -> None:
    folder = folder_of(root / "step", {"a.safetensors": ONE})
    (folder / INDEX).write_text(index)
    with pytest.raises(Refused, match=said):
        opened(folder, root)


def test_one_tensor_in_two_files(root: Path) -> None:
    folder = folder_of(root / "step", {"a.safetensors": ONE, "b.safetensors": ONE | TWO})
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}})
    )
    with pytest.raises(Refused, match=r"b\.safetensors differ in one"):
        opened(folder, root)


def test_digests_name_every_file(root: Path) -> None:
    folder = folder_of(root / "step", {"a.safetensors": ONE, "b.safetensors": TWO})
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors")
    }
    checkpoint = open_checkpoint(str(folder), [str(root)])
    checkpoint.verify(digests)
    for wrong, said in (
        (digests | {"a.safetensors": "00" * 32}, r"a\.safetensors does not have the SHA-256"),
        (digests | {"c.safetensors": "00" * 32}, r"differ in c\.safetensors"),
        ({"a.safetensors": digests["a.safetensors"]}, r"differ in b\.safetensors"),
    ):
        with pytest.raises(Refused, match=said):
            checkpoint.verify(wrong)


def test_what_is_checked_is_what_is_loaded(root: Path) -> None:
    """A file that is put in the place of an open one is another file."""
    path = root / "step.safetensors"
    path.write_bytes(file_of(ONE))
    checkpoint = open_checkpoint(str(path), [str(root)])
    (root / "next").write_bytes(file_of(TWO))
    (root / "next").rename(path)
    checkpoint.verify({path.name: hashlib.sha256(file_of(ONE)).hexdigest()})
    assert list(checkpoint.tensors) == ["one"]
