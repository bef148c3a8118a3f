"""Reading checkpoints, and refusing them with the name of what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from app.reference_engine.assembly import build_rank
from app.reference_engine.config import parse_config, read_config
from app.reference_engine.errors import (
    CheckpointError,
    CheckpointFileInvalid,
    CheckpointFileMissing,
    CheckpointNotFound,
    TensorMismatch,
    TensorMissing,
    TensorUnexpected,
    TokenizerMismatch,
    UnsupportedArchitecture,
)
from app.reference_engine.limits import CoreSettings, capacity_of
from app.reference_engine.model import Span
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from app.reference_engine.tokenizer import Tokenizer
from app.reference_engine.weights import expected_shapes, load_weights
from tests.reference_engine.checkpoints import cache_for, ours, reference_logits

Damage = Callable[[Path], None]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return ensure_tiny_checkpoint(tmp_path, 0)


def edit_config(**changes: Any) -> Damage:
    def damage(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return damage


def write(name: str, content: bytes) -> Damage:
    def damage(directory: Path) -> None:
        (directory / name).write_bytes(content)

    return damage


def remove(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (remove("config.json"), CheckpointFileMissing, "config.json"),
        (remove("model.safetensors"), CheckpointFileMissing, "model.safetensors"),
        (remove("tokenizer.json"), CheckpointFileMissing, "tokenizer.json"),
        (write("config.json", b"{"), CheckpointFileInvalid, "config.json"),
        (write("config.json", b"[]"), CheckpointFileInvalid, "config.json"),
        (write("config.json", b"\xff"), CheckpointFileInvalid, "config.json"),
        (write("config.json", b'{"vocab_size": 3}'), CheckpointFileInvalid, "num_attention_heads"),
        (write("tokenizer.json", b"{}"), CheckpointFileInvalid, "tokenizer.json"),
        (write("model.safetensors", b"nothing"), CheckpointFileInvalid, "model.safetensors"),
        (write("generation_config.json", b"x"), CheckpointFileInvalid, "generation_config.json"),
        (edit_config(num_attention_heads=3), CheckpointFileInvalid, "config.json"),
        (edit_config(head_dim=31), CheckpointFileInvalid, "head_dim"),
        (edit_config(hidden_size="128"), CheckpointFileInvalid, "hidden_size"),
        (edit_config(architectures=["GPT2LMHeadModel"]), UnsupportedArchitecture, "architecture"),
        (edit_config(model_type="qwen3"), UnsupportedArchitecture, "qwen3"),
        (edit_config(hidden_act="gelu"), UnsupportedArchitecture, "gelu"),
        (edit_config(quantization_config={"bits": 4}), UnsupportedArchitecture, "quantization"),
        (edit_config(rope_scaling={"rope_type": "yarn"}), UnsupportedArchitecture, "yarn"),
        (
            edit_config(rope_parameters={"partial_rotary_factor": 0.5}),
            UnsupportedArchitecture,
            "partial_rotary_factor",
        ),
        (edit_config(vocab_size=400), TokenizerMismatch, "400"),
        (edit_config(intermediate_size=255), TensorMismatch, "mlp."),
        (edit_config(num_hidden_layers=3), TensorMissing, "model.layers.2."),
        (edit_config(num_hidden_layers=1), TensorUnexpected, "model.layers.1."),
        (edit_tensors(lambda t: t.pop(GATE)), TensorMissing, GATE),
        (edit_tensors(lambda t: t.pop("lm_head.weight")), TensorMissing, "lm_head.weight"),
        (edit_tensors(lambda t: t.update({GATE: t[GATE].T.contiguous()})), TensorMismatch, GATE),
        (edit_tensors(lambda t: t.update({GATE: t[GATE].to(torch.int8)})), TensorMismatch, "int8"),
        (
            edit_tensors(lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(256)})),
            TensorUnexpected,
            "model.layers.0.mlp.up_proj.bias",
        ),
        (
            write("model.safetensors.index.json", b'{"weight_map": {"a": "../x.safetensors"}}'),
            CheckpointFileInvalid,
            "plain file name",
        ),
        (
            write("model.safetensors.index.json", b'{"weight_map": {"a": "one.safetensors"}}'),
            CheckpointFileMissing,
            "one.safetensors",
        ),
        (write("model.safetensors.index.json", b"{}"), CheckpointFileInvalid, "weight_map"),
    ],
)
def test_damaged_checkpoint_is_refused_by_name(
    checkpoint: Path, damage: Damage, error: type[CheckpointError], named: str
) -> None:
    damage(checkpoint)
    with pytest.raises(error) as raised:
        build_rank(checkpoint, CoreSettings())
    assert named in str(raised.value)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="nowhere"):
        read_config(tmp_path / "nowhere")


def test_sharded_checkpoint_equals_the_single_file(checkpoint: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="500KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    config = read_config(checkpoint)
    single, several = load_weights(checkpoint, config), load_weights(sharded, config)
    assert single.keys() == several.keys() == expected_shapes(config).keys()
    assert all(torch.equal(single[name], several[name]) for name in single)


def test_tied_checkpoint_may_bring_a_copy_of_the_head(checkpoint: Path) -> None:
    edit_config(tie_word_embeddings=True)(checkpoint)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(lambda t: t.update({buffer: torch.ones(16)}))(checkpoint)
    weights = load_weights(checkpoint, read_config(checkpoint))
    assert "lm_head.weight" not in weights
    assert buffer not in weights


def test_end_ids_of_the_generation_config_come_first(checkpoint: Path) -> None:
    raw = json.loads((checkpoint / "config.json").read_text())
    assert parse_config(raw, {}).eos_token_ids == (1,)
    assert parse_config(raw, {"eos_token_id": [5, 7]}).eos_token_ids == (5, 7)
    assert parse_config(raw | {"eos_token_id": None}, {}).eos_token_ids == ()


def test_tiny_checkpoint_is_deterministic(tmp_path: Path) -> None:
    first = ensure_tiny_checkpoint(tmp_path / "a", 4)
    # Another process: hash seeds and thread timing must not show.
    call = "from pathlib import Path; from app.reference_engine.tiny_model import *"
    call += f"; ensure_tiny_checkpoint(Path({str(tmp_path / 'b')!r}), 4)"
    subprocess.run([sys.executable, "-c", call], check=True, cwd=Path(__file__).parents[2])
    second = tmp_path / "b" / first.name
    names = {path.name for path in first.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert names == {path.name for path in second.iterdir()}
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    other = ensure_tiny_checkpoint(tmp_path / "a", 5)
    weights = "model.safetensors"
    assert (first / weights).read_bytes() != (other / weights).read_bytes()


def test_tiny_checkpoint_is_a_llama_to_transformers_too(checkpoint: Path) -> None:
    text = "the captain orders the helm hard to port, ½ ahead"
    tokens = Tokenizer.load(checkpoint).encode(text)
    assert list(tokens) == AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"]
    config, model = ours(checkpoint, 64)
    logits = model.forward(tokens, [Span(0, len(tokens), (0, 1, 2))], cache_for(config, 3, 16))[0]
    expected = reference_logits(LlamaForCausalLM.from_pretrained(checkpoint), list(tokens))[-1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_killed_first_start_leaves_nothing_half_made(tmp_path: Path) -> None:
    """Killed in the middle of writing: no checkpoint is there, and the next start makes one."""
    call = f"""
import os, signal
from pathlib import Path
from app.reference_engine import tiny_model
def stop(*_args):
    os.kill(os.getpid(), signal.SIGKILL)
tiny_model.save_file = stop
tiny_model.ensure_tiny_checkpoint(Path({str(tmp_path)!r}), 0)
"""
    killed = subprocess.run([sys.executable, "-c", call], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    visible = [name for name in os.listdir(tmp_path) if not name.startswith(".")]
    assert visible == []
    directory = ensure_tiny_checkpoint(tmp_path, 0)
    build_rank(directory, CoreSettings())
    assert not (tmp_path / ".making").exists()


def test_capacity_follows_from_settings_and_checkpoint(checkpoint: Path) -> None:
    edit_config(max_position_embeddings=131_072)(checkpoint)
    config = read_config(checkpoint)

    def capacity(**settings: Any) -> tuple[int, int]:
        found = capacity_of(CoreSettings(**settings), config)
        return found.kv_blocks, found.max_model_len

    assert capacity() == (1024, 16_384)
    assert capacity(max_model_len=1000) == (1024, 1000)
    assert capacity(max_model_len=20_001, block_size=8) == (2501, 20_001)
    assert capacity(max_model_len=200_000) == (8192, 131_072)
    assert capacity(kv_blocks=10) == (10, 160)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"kv_blocks": 0},
        {"step_delay_ms": -1},
        {"max_running": 600},
        {"torch_threads": 0},
        {"tensor_parallel_size": 0},
        {"device": "tpu"},
    ],
)
def test_settings_that_can_not_work(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        CoreSettings(**wrong)
