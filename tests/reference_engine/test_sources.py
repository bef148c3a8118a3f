"""From where new weights may come: nothing outside the allowed roots, no segment of others."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from uuid import uuid4

import pytest

from app.reference_engine.change_orders import SharedTensor
from app.reference_engine.errors import CheckpointError, SourceRefused
from app.reference_engine.segments import hold, sweep
from app.reference_engine.sources import InlineTensor, SourcePolicy, discard


@pytest.fixture
def policy(tiny: Path) -> SourcePolicy:
    return SourcePolicy(roots=(tiny.parent,), shared_prefix=f"chadburn-test-{uuid4().hex}-")


def test_files_by_their_real_paths(tiny: Path, policy: SourcePolicy) -> None:
    file = tiny / "model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (found,) = policy.disk(str(tiny), {file.name: digest}).files
    assert (found.path, found.sha256) == (str(file.resolve()), digest)
    assert policy.disk(str(file)).files[0].path == found.path


@pytest.mark.parametrize("place", ["/", "/etc/passwd", "{root}/..", "{root}/nothing", "\0", "."])
def test_elsewhere_and_nowhere_look_alike(tiny: Path, policy: SourcePolicy, place: str) -> None:
    with pytest.raises(SourceRefused, match="not there, or not below an allowed root"):
        policy.disk(place.format(root=tiny.parent))


def test_links_that_lead_out_are_refused(tiny: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    policy = SourcePolicy(roots=(root,))
    (root / "folder").symlink_to(tiny)
    with pytest.raises(SourceRefused):
        policy.disk(str(root / "folder"))
    (root / "inside").mkdir()
    (root / "inside" / "model.safetensors").symlink_to(tiny / "model.safetensors")
    with pytest.raises(SourceRefused):
        policy.disk(str(root / "inside"))
    with pytest.raises(SourceRefused):
        SourcePolicy().disk(str(tiny))


@pytest.mark.parametrize("digests", [{"model.safetensors": "abc"}, {"other.safetensors": "0" * 64}])
def test_digests_that_can_not_be_meant(
    tiny: Path, policy: SourcePolicy, digests: dict[str, str]
) -> None:
    with pytest.raises(SourceRefused, match="sha256"):
        policy.disk(str(tiny), digests)


def test_folder_without_weights(policy: SourcePolicy, tiny: Path) -> None:
    (tiny.parent / "empty").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="missing"):
        policy.disk(str(tiny.parent / "empty"))


def test_segments_of_this_engine_alone(policy: SourcePolicy) -> None:
    placed = (SharedTensor("a", "F32", (1,), 0),)
    for name in ("other", f"{policy.shared_prefix}/../x", f"{policy.shared_prefix}none"):
        with pytest.raises(SourceRefused):
            policy.shared(name, placed)
    source = policy.inline([InlineTensor("a", "F32", (1,), b"1234")])
    path = Path(source.path)
    try:
        assert policy.shared(path.name, placed) == source
        assert path.stat().st_mode & 0o777 == 0o600
        linked = path.with_name(f"{policy.shared_prefix}link")
        linked.symlink_to(path)
        try:
            with pytest.raises(SourceRefused, match="does not belong"):
                policy.shared(linked.name, placed)
        finally:
            linked.unlink()
    finally:
        discard(source)
    discard(source)
    assert not os.path.exists(path)


def test_segments_of_engines_that_are_gone_are_removed(policy: SourcePolicy) -> None:
    placed = [SharedTensor("a", "F32", (1,), 0)]
    left, held = policy.room(placed, [4]), policy.room(placed, [4])
    foreign = Path(left.path).with_name(f"{policy.shared_prefix}own-by-somebody-else")
    foreign.touch()
    holding = hold(held.path)
    later = time.time() + 3600
    try:
        assert sweep(policy.shared_prefix, time.time()) == []
        assert sweep(policy.shared_prefix, later) == [left.path]
        assert os.path.exists(held.path)
        assert foreign.exists()
        os.close(holding)
        assert sweep(policy.shared_prefix, later) == [held.path]
    finally:
        foreign.unlink()
        discard(left)
        discard(held)


def test_room_that_is_not_there_is_not_promised(policy: SourcePolicy) -> None:
    with pytest.raises(SourceRefused, match="no room for"):
        policy.room([SharedTensor("a", "F32", (1 << 50,), 0)], [1 << 52])
    assert not list(Path("/dev/shm").glob(f"{policy.shared_prefix}*"))
