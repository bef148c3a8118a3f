"""Which adapters fit a model, by their files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.conformance.tensors import Tensor, written
from app.sidecars.adapter_files import adapter_fits
from app.sidecars.safetensors import BadWeights

_ATTENTION = "model.layers.0.self_attn"
_PARTS = {
    "model.embed_tokens": (6, 3),
    f"{_ATTENTION}.q_proj": (4, 3),
    f"{_ATTENTION}.k_proj": (2, 3),
    f"{_ATTENTION}.v_proj": (2, 3),
}
_Q, _V = f"{_ATTENTION}.q_proj.lora_%s.weight", f"{_ATTENTION}.v_proj.lora_%s.weight"
_E = "model.embed_tokens.lora_embedding_%s"
_GOOD: dict[str, tuple[int, ...]] = {
    _Q % "A": (2, 3), _Q % "B": (4, 2), _V % "A": (2, 3), _V % "B": (2, 2),
    _E % "A": (2, 6), _E % "B": (3, 2),
}  # fmt: skip
_CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4,
    "target_modules": ["q_proj", "v_proj", "embed_tokens"],
}  # fmt: skip


def _write(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> None:
    tensors = []
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        tensors.append(Tensor(name, dtype, shape, bytes(4 * count)))
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(written(tensors))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = {f"{name}.weight": shape for name, shape in _PARTS.items()}
    _write(tmp_path / "model" / "model.safetensors", {**weights, "model.q.qweight": (1,)})
    return tmp_path / "model"


def _adapter(
    folder: Path,
    shapes: dict[str, tuple[int, ...]] | None = None,
    dtype: str = "F32",
    config: dict[str, Any] | None = None,
) -> Path:
    known = {f"base_model.model.{name}": one for name, one in (shapes or _GOOD).items()}
    _write(folder / "adapter_model.safetensors", known, dtype)
    (folder / "adapter_config.json").write_text(json.dumps({**_CONFIG, **(config or {})}))
    return folder


def test_one_that_fits(tmp_path: Path, model: Path) -> None:
    adapter_fits(_adapter(tmp_path / "a"), model)
    # Of what is quantized the files do not tell the shape.
    quantized = {**_GOOD, "model.q.lora_A.weight": (2, 9), "model.q.lora_B.weight": (9, 2)}
    targets = [*_CONFIG["target_modules"], "q"]
    adapter_fits(_adapter(tmp_path / "b", quantized, config={"target_modules": targets}), model)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({_Q % "A": (2, 4)}, "another shape"),
        ({_Q % "B": (3, 2)}, "another shape"),
        ({_Q % "A": (1, 3)}, "another rank"),
        ({_Q % "A": (2, 3, 1)}, "none of an adapter"),
        ({_E % "A": (2, 3)}, "another shape"),
        ({f"{_ATTENTION}.q_proj.lora_embedding_A": (2, 4)}, "what is none"),
        ({f"{_ATTENTION}.q_proj.magnitude": (2, 4)}, "none of an adapter"),
        ({f"{_ATTENTION}.k_proj.lora_A.weight": (2, 3)}, "not its targets"),
        ({"model.layers.9.self_attn.q_proj.lora_A.weight": (2, 3)}, "does not have"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, model: Path, changed: dict[str, tuple[int, ...]], why: str
) -> None:
    with pytest.raises(BadWeights, match=why):
        adapter_fits(_adapter(tmp_path / "a", {**_GOOD, **changed}), model)


def test_parts_that_engines_put_together(tmp_path: Path, model: Path) -> None:
    for left_out, why in ((_Q, "v_proj of a layer without its q_proj"), (_V, "without its v_proj")):
        some = {
            name: one for name, one in _GOOD.items() if name not in (left_out % "A", left_out % "B")
        }
        with pytest.raises(BadWeights, match=why):
            adapter_fits(_adapter(tmp_path / "a", some), model)
    half = {name: one for name, one in _GOOD.items() if name != _Q % "B"}
    with pytest.raises(BadWeights, match="of a pair"):
        adapter_fits(_adapter(tmp_path / "a", half), model)


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 2.0}, {"r": "2"}, {"r": True}, {"r": 0}, {"r": -2}, {"r": 3},
        {"lora_alpha": float("nan")}, {"lora_alpha": "4"}, {"peft_type": "IA3"},
        {"use_dora": True}, {"target_modules": "all-linear"}, {"target_modules": [1]},
        {"target_modules": None}, {"target_modules": ["k_proj"]},
    ],
)  # fmt: skip
def test_configurations_that_are_none(tmp_path: Path, model: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(BadWeights):
        adapter_fits(_adapter(tmp_path / "a", config=fields), model)


def test_folders_that_are_no_adapter(tmp_path: Path, model: Path) -> None:
    folder = _adapter(tmp_path / "a")
    with pytest.raises(BadWeights):
        adapter_fits(_adapter(tmp_path / "i", dtype="I32"), model)
    for config in ("{", "[]", "[" * 100_000, "\ud800"):
        (folder / "adapter_config.json").write_bytes(config.encode("utf-8", "surrogatepass"))
        with pytest.raises(BadWeights):
            adapter_fits(folder, model)
    _adapter(folder)
    (folder / "other.safetensors").write_bytes(b"x")
    with pytest.raises(BadWeights, match="no other weights"):
        adapter_fits(folder, model)
    (folder / "other.safetensors").rename(folder / "model.safetensors.index.json")
    with pytest.raises(BadWeights, match="no other weights"):
        adapter_fits(folder, model)
