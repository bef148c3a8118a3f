"""What an adapter's ``adapter_config.json`` says, as far as this decoder can follow it.

Source of the field names and their meaning: ``LoraConfig`` of Hugging Face peft. What would make
the adapter compute something else than ``W x + scale B A x`` is refused by name, and so is every
setting that is not known here and is switched on: leaving it out would give other results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.reference_engine.config import ModelConfig
from app.reference_engine.errors import AdapterRefused

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
MAX_RANK = 1024
MAX_ALPHA = 1e9

_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "layers_to_transform",
    "init_lora_weights",
    "bias",
    "task_type",
}
# They say nothing about what is computed, or matter only beside a setting that is refused.
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
}
# Beginnings that leave the base weights alone; the others (pissa, olora, loftq …) train on changed
# ones, which a checkpoint does not have.
_BEGINNINGS = ("gaussian", "orthogonal", "eva")
_NAME = re.compile(r"[A-Za-z0-9_.]{1,200}")


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """``rank`` of both matrices, ``scale`` of their product, and the full names of the projections
    that are changed, in the model's own order."""

    rank: int
    scale: float
    modules: tuple[str, ...]


def parse_adapter(raw: Mapping[str, Any], model: ModelConfig) -> AdapterShape:
    """Raises AdapterRefused naming the setting."""
    if raw.get("peft_type") != "LORA":
        raise AdapterRefused("peft_type is not LORA")
    _refuse_what_would_be_computed_wrongly(raw)
    rank = raw.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise AdapterRefused(f"r should be a whole number from 1 to {MAX_RANK}")
    alpha = raw.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise AdapterRefused("lora_alpha should be a number")
    # Before any arithmetic: JSON has numbers that no float can hold.
    if not -MAX_ALPHA <= alpha <= MAX_ALPHA:
        raise AdapterRefused("lora_alpha is out of all bounds")
    stabilized = raw.get("use_rslora") or False
    if not isinstance(stabilized, bool):
        raise AdapterRefused("use_rslora should be true or false")
    scale = alpha / (math.sqrt(rank) if stabilized else rank)
    return AdapterShape(rank, scale, _modules(raw, model))


def _refuse_what_would_be_computed_wrongly(raw: Mapping[str, Any]) -> None:
    if raw.get("use_dora"):
        raise AdapterRefused("use_dora: DoRA is not supported")
    if raw.get("bias", "none") != "none":
        raise AdapterRefused("bias: adapters with biases of their own are not supported")
    if raw.get("modules_to_save"):
        raise AdapterRefused("modules_to_save: whole modules beside the adapter are not supported")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterRefused("task_type is not CAUSAL_LM")
    beginning = raw.get("init_lora_weights", True)
    if not isinstance(beginning, bool) and beginning not in _BEGINNINGS:
        raise AdapterRefused("init_lora_weights: it was trained on changed base weights")
    for name in sorted(set(raw) - _READ - _WITHOUT_EFFECT - {"use_dora", "modules_to_save"}):
        # layers_pattern is looked at only where layers are named.
        if name == "layers_pattern" and raw.get("layers_to_transform") is None:
            continue
        if raw[name]:
            known = name if _NAME.fullmatch(name) else "a setting"
            raise AdapterRefused(f"{known}: not supported")


def _modules(raw: Mapping[str, Any], model: ModelConfig) -> tuple[str, ...]:
    """As peft takes a list: a module is meant by its whole name or by the end of it."""
    everything = tuple(
        f"model.layers.{layer}.{projection}"
        for layer in _layers(raw, model)
        for projection in PROJECTIONS
    )
    targets = raw.get("target_modules")
    if targets == "all-linear":
        return everything
    if not isinstance(targets, list) or not targets:
        raise AdapterRefused("target_modules should be a list of names; patterns are not supported")
    if any(not isinstance(target, str) or not _NAME.fullmatch(target) for target in targets):
        raise AdapterRefused("target_modules should be names of modules")
    meant: set[str] = set()
    for target in sorted(set(targets)):
        found = {name for name in everything if name == target or name.endswith(f".{target}")}
        if not found:
            raise AdapterRefused(f"target_modules: {target!r} is no projection of this model")
        meant |= found
    return tuple(name for name in everything if name in meant)


def _layers(raw: Mapping[str, Any], model: ModelConfig) -> tuple[int, ...]:
    wanted = raw.get("layers_to_transform")
    if wanted is None:
        return tuple(range(model.num_layers))
    numbers = wanted if isinstance(wanted, list) else [wanted]
    if not numbers or any(not isinstance(one, int) or isinstance(one, bool) for one in numbers):
        raise AdapterRefused("layers_to_transform should be numbers of layers")
    if not set(numbers) <= set(range(model.num_layers)):
        raise AdapterRefused("layers_to_transform: this model has fewer layers")
    return tuple(sorted(set(numbers)))
