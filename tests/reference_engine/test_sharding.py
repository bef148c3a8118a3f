"""A model divided among ranks: the parts are the whole, and none has more than it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.reference_engine.config import ModelConfig, parse_config, read_config
from app.reference_engine.errors import UnsupportedArchitecture
from app.reference_engine.sharding import Layout
from app.reference_engine.tensor_files import TensorFile
from app.reference_engine.weights import expected_shapes, load_part, load_weights


def config_of(heads: int, kv_heads: int, **settings: int) -> ModelConfig:
    raw = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    raw |= {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 33, "num_hidden_layers": 1}
    return parse_config(raw | settings | {"attention_bias": True, "mlp_bias": True}, {})


@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    shared=st.sampled_from([1, 2, 4]),
    world_size=st.sampled_from([1, 2, 4]),
    channels=st.integers(5, 70),
    tokens=st.integers(5, 70),
)
def test_parts_are_the_whole(
    kv_heads: int, shared: int, world_size: int, channels: int, tokens: int
) -> None:
    heads = kv_heads * shared
    config = config_of(heads, kv_heads, intermediate_size=channels, vocab_size=tokens)
    if heads % world_size:
        with pytest.raises(UnsupportedArchitecture, match="tensor parallel size"):
            Layout(config, 0, world_size)
        return
    ranks = [Layout(config, rank, world_size) for rank in range(world_size)]
    assert [head for one in ranks for head in one.heads] == list(range(heads))
    for one in ranks:
        # Every query head finds the key-value head it belongs to, and no other is held.
        assert {head // shared for head in one.heads} == set(one.kv_heads)
        assert one.local.num_heads % one.local.num_kv_heads == 0
    for name, shape in expected_shapes(config).items():
        covered = torch.zeros(shape, dtype=torch.int64)
        for one in ranks:
            cut = one.cut(name)
            part = (
                covered if cut is None else covered.narrow(cut.dim, cut.start, cut.stop - cut.start)
            )
            part += 1
            assert tuple(part.shape) == (shape if cut is None else cut.of(shape))
        assert covered.min() > 0
        if ".k_proj." not in name and ".v_proj." not in name:
            assert covered.max() in (1, world_size)


def test_the_parts_of_a_checkpoint_are_what_the_layout_says(tiny: Path) -> None:
    config = read_config(tiny)
    whole = load_weights(tiny, config)
    for rank in range(2):
        layout = Layout(config, rank, 2)
        for name, part in load_part(tiny, layout).items():
            cut = layout.cut(name)
            expected = whole[name]
            if cut is not None:
                expected = expected.narrow(cut.dim, cut.start, cut.stop - cut.start)
            assert torch.equal(part, expected), name
            # Its own memory, no larger than the part: neither the file's nor the whole tensor's.
            assert part.untyped_storage().nbytes() == part.numel() * 4


def test_live_weights_do_not_follow_the_file(tiny: Path, tmp_path: Path) -> None:
    config = read_config(tiny)
    directory = tmp_path / "copy"
    directory.mkdir()
    file = directory / "model.safetensors"
    file.write_bytes((tiny / file.name).read_bytes())
    before = load_weights(tiny, config)
    weights = load_weights(directory, config)
    file.write_bytes(b"\xff" * file.stat().st_size)
    file.write_bytes(b"")
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_a_file_that_changes_while_it_is_read_is_found_out(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "model.safetensors"
    content = (tiny / path.name).read_bytes()
    path.write_bytes(content)
    with TensorFile(path) as file:
        file.check_unchanged()
        path.write_bytes(content[:-1])
        with pytest.raises(Exception, match="changed while it was read"):
            file.check_unchanged()
