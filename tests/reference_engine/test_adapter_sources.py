"""Which adapters are taken at all, and what is said of the others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.reference_engine.adapter_config import PROJECTIONS, parse_adapter
from app.reference_engine.adapter_reading import read_adapter
from app.reference_engine.adapter_sources import AdapterPolicy
from app.reference_engine.config import ModelConfig, read_config
from app.reference_engine.errors import AdapterRefused, CheckpointError, SourceRefused
from app.reference_engine.sharding import Layout
from app.reference_engine.tiny_adapter import write_tiny_adapter
from tests.reference_engine.adapters import CONFIG, TENSORS, loading

GATE_A = "base_model.model.model.layers.1.mlp.gate_proj.lora_A.weight"
OUT_B = "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"


@pytest.fixture(scope="module")
def model(tiny: Path) -> ModelConfig:
    return read_config(tiny)


@pytest.fixture
def adapter(tiny: Path, tmp_path: Path) -> Path:
    return write_tiny_adapter(tiny, tmp_path / "root" / "tone")


def find(adapter: Path, model: ModelConfig) -> Any:
    return AdapterPolicy(roots=(adapter.parent,)).find(str(adapter), model)


# ---- adapter_config.json ----

PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
    # What peft writes besides, at its defaults.
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "somewhere/else",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "qalora_group_size": 16,
    "rank_pattern": {},
    "revision": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


def test_plain_adapter(model: ModelConfig) -> None:
    found = parse_adapter(PLAIN, model)
    assert (found.rank, found.scale) == (8, 2.0)
    assert found.modules == tuple(
        f"model.layers.{layer}.self_attn.{one}" for layer in (0, 1) for one in ("q_proj", "v_proj")
    )
    stabilized = parse_adapter(PLAIN | {"use_rslora": True}, model)
    assert stabilized.scale == pytest.approx(16 / sqrt(8))


@pytest.mark.parametrize(
    ("targets", "layers", "meant"),
    [
        ("all-linear", None, {f"model.layers.{n}.{one}" for n in (0, 1) for one in PROJECTIONS}),
        ("all-linear", 1, {f"model.layers.1.{one}" for one in PROJECTIONS}),
        (["mlp.down_proj"], [0], {"model.layers.0.mlp.down_proj"}),
        (["model.layers.1.self_attn.k_proj"], None, {"model.layers.1.self_attn.k_proj"}),
        (["layers.0.mlp.up_proj", "1.mlp.up_proj"], None, None),
    ],
)
def test_target_modules(
    model: ModelConfig, targets: Any, layers: Any, meant: set[str] | None
) -> None:
    raw = PLAIN | {"target_modules": targets, "layers_to_transform": layers}
    if meant is None:
        meant = {f"model.layers.{n}.mlp.up_proj" for n in (0, 1)}
    assert set(parse_adapter(raw, model).modules) == meant


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"exclude_modules": ["k_proj"]}, "exclude_modules"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"a_thing_to_come": {"x": 1}}, "a_thing_to_come"),
        ({"\n\x1b[31m": 1}, "a setting"),
        ({"target_modules": "model.*q_proj"}, "patterns"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ["c_attn"]}, "'c_attn' is no projection"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head' is no projection"),
        ({"target_modules": ["q_proj", 3]}, "target_modules"),
        ({"layers_to_transform": [0, 2]}, "fewer layers"),
        ({"layers_to_transform": []}, "layers_to_transform"),
        ({"layers_to_transform": [True]}, "layers_to_transform"),
        ({"layers_to_transform": 0, "layers_pattern": "blocks"}, "layers_pattern"),
        ({"r": 0}, "r should"),
        ({"r": 1 << 20}, "r should"),
        ({"r": True}, "r should"),
        ({"r": "8"}, "r should"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
    ],
)
def test_what_would_be_computed_wrongly(
    model: ModelConfig, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(AdapterRefused, match=named):
        parse_adapter(PLAIN | changed, model)


# ---- the folder ----


def test_found_by_its_real_path(adapter: Path, model: ModelConfig) -> None:
    link = adapter.parent / "link"
    link.symlink_to(adapter)
    found = AdapterPolicy(roots=(adapter.parent,)).find(str(link), model)
    assert found.path == str((adapter / TENSORS).resolve())
    assert (found.rank, found.scale) == (4, 2.0)


def pickled(adapter: Path) -> None:
    (adapter / TENSORS).rename(adapter / "adapter_model.bin")


def a_pipe(adapter: Path) -> None:
    (adapter / CONFIG).unlink()
    os.mkfifo(adapter / CONFIG)


def large(adapter: Path) -> None:
    (adapter / CONFIG).write_text(" " * (2 << 20))


def linked_out(adapter: Path) -> None:
    outside = adapter.parents[1] / "outside.safetensors"
    shutil.move(adapter / TENSORS, outside)
    (adapter / TENSORS).symlink_to(outside)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (pickled, "pickled"),
        (lambda one: (one / TENSORS).unlink(), TENSORS),
        (lambda one: (one / CONFIG).unlink(), CONFIG),
        (lambda one: (one / CONFIG).write_text("{"), "not JSON"),
        (lambda one: (one / CONFIG).write_text("[" * 100_000), "not JSON"),
        (lambda one: (one / CONFIG).write_text("[]"), "not a JSON object"),
        (large, "larger"),
        (a_pipe, "not a regular file"),
        (linked_out, "allowed root"),
    ],
)
def test_folder_that_is_none(
    adapter: Path, model: ModelConfig, damage: Callable[[Path], object], named: str
) -> None:
    damage(adapter)
    with pytest.raises(AdapterRefused, match=named):
        find(adapter, model)


def test_only_below_the_roots(adapter: Path, model: ModelConfig, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "link").symlink_to(adapter)
    policy = AdapterPolicy(roots=(elsewhere,))
    said = set()
    for path in (adapter, elsewhere / "link", elsewhere / "nothing", elsewhere / ".." / "root"):
        with pytest.raises(SourceRefused) as refused:
            policy.find(str(path), model)
        said.add(str(refused.value))
    assert len(said) == 1  # what is there and what is not looks the same
    with pytest.raises(SourceRefused):
        AdapterPolicy().find(str(adapter), model)
    with pytest.raises(AdapterRefused, match="folder"):
        AdapterPolicy(roots=(adapter,)).find(str(adapter / TENSORS), model)


# ---- its tensors, on a rank ----


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(adapter: Path) -> None:
        tensors = {name: one.clone() for name, one in load_file(adapter / TENSORS).items()}
        change(tensors)
        save_file(tensors, adapter / TENSORS, {"format": "pt"})

    return damage


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (edit(lambda t: t.pop(GATE_A)), f"{GATE_A}.*missing"),
        (edit(lambda t: t.update({GATE_A: t[GATE_A][:3].clone()})), f"{GATE_A}.*shape"),
        (edit(lambda t: t.update({OUT_B: t[OUT_B].T.contiguous()})), f"{OUT_B}.*shape"),
        (edit(lambda t: t.update({OUT_B: t[OUT_B].to(torch.int8)})), f"{OUT_B}.*floating"),
        (edit(lambda t: t[OUT_B].fill_(torch.nan)), f"{OUT_B}.*finite"),
        (edit(lambda t: t.update({f"{GATE_A}.bias": torch.ones(1)})), f"{GATE_A}.bias"),
        (lambda one: os.truncate(one / TENSORS, 700), "not whole|header"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_tensors_that_do_not_fit(
    tiny: Path,
    adapter: Path,
    model: ModelConfig,
    damage: Callable[[Path], object],
    named: str,
    world_size: int,
) -> None:
    damage(adapter)
    order = loading(tiny, adapter)
    for rank in range(world_size):
        with pytest.raises((AdapterRefused, CheckpointError), match=named):
            read_adapter(order, Layout(model, rank, world_size), torch.device("cpu"), lambda: None)


def test_file_that_changed_since_it_was_found(
    tiny: Path, adapter: Path, model: ModelConfig
) -> None:
    order = loading(tiny, adapter)
    write_tiny_adapter(tiny, adapter, seed=9)
    with pytest.raises(AdapterRefused, match="changed"):
        read_adapter(order, Layout(model), torch.device("cpu"), lambda: None)
    (adapter / TENSORS).unlink()
    (adapter / TENSORS).symlink_to(tiny / "model.safetensors")
    with pytest.raises(CheckpointError, match="link"):
        read_adapter(order, Layout(model), torch.device("cpu"), lambda: None)
