"""A small deterministic checkpoint, for an engine that is started without one.

Its weights are random numbers of a fixed seed; it is a real Llama checkpoint in every respect, and
knows nothing. Its tokenizer is trained here on a few lines about steering a ship, and its output
head leans towards whole words, so that what it says can be watched with some pleasure.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from app.reference_engine.config import ModelConfig, parse_config
from app.reference_engine.first_start import tiny_checkpoint_path
from app.reference_engine.weights import EMBEDDING, LM_HEAD, expected_shapes

_VOCABULARY = 768  # an upper bound: training stops when every word is one token
_LONGEST_WAIT_S = 60.0
_SPECIAL = ("<|begin|>", "<|end|>")
_BEGIN, _END = 0, 1
_LINES = (
    "the bridge rings full ahead and the engine room answers full ahead",
    "slow astern, stop engines, half ahead, dead slow ahead, finished with engines",
    "the captain orders the helm hard to port and the pilot repeats the order",
    "steady as she goes, steer north by east, keep her on course through the narrow channel",
    "the chief engineer opens the throttle and steam rises in the boiler",
    "the pointer moves, the bell rings twice, and every order stands in the book",
    "low water under the keel, rocks off the starboard bow, fog over the harbour",
    "a lamp on the mast, a light on the pier, a whistle far away in the night",
    "the crew stands by the lines while the ship comes slowly alongside",
    "wind from the west, long swell, the deck is wet and the watch changes at eight",
    "we have heard your signal and we will wait for the morning tide",
    "the old telegraph of brass and glass shines between the wheel and the window",
    "drop anchor here, pay out the chain, and let the sea be quiet",
    "two turns of the screw, then nothing, then the slow beat of the engine again",
    "the chart shows a deep passage to the open ocean beyond the last island",
)


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": _BEGIN,
        "eos_token_id": _END,
        "torch_dtype": "float32",
    }


def ensure_tiny_checkpoint(parent: Path, seed: int) -> Path:
    """The folder of the small checkpoint for ``seed`` below ``parent``, made if it is not there.

    Either the whole checkpoint is there or nothing: it is made aside and moved into place. Engines
    that start at once wait for each other; what a killed one left aside is cleared away.
    """
    target = tiny_checkpoint_path(parent, seed)
    if target.is_dir():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / ".making.lock", timeout=_LONGEST_WAIT_S):
        if target.is_dir():
            return target
        aside = parent / ".making"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        _write(aside, seed)
        aside.rename(target)
    return target


def _write(directory: Path, seed: int) -> None:
    tokenizer = _tokenizer()
    raw = _config()
    raw["vocab_size"] = tokenizer.get_vocab_size()
    config = parse_config(raw, {})
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    generation = {"bos_token_id": _BEGIN, "eos_token_id": _END}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    names = {"tokenizer_class": "PreTrainedTokenizerFast"}
    names |= {"bos_token": _SPECIAL[_BEGIN], "eos_token": _SPECIAL[_END]}
    (directory / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")
    save_file(_weights(config, tokenizer, seed), directory / "model.safetensors", {"format": "pt"})
    for path in directory.iterdir():
        with path.open("rb") as written:
            os.fsync(written.fileno())


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f" {line}." for line in _LINES), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_SPECIAL[_BEGIN]} $A", special_tokens=[(_SPECIAL[_BEGIN], _BEGIN)]
    )
    return tokenizer


def _weights(config: ModelConfig, tokenizer: Tokenizer, seed: int) -> dict[str, torch.Tensor]:
    """Random, scaled so that attention and MLP matter as much as the last token does.

    Channel 0 of the residual stream carries a constant that no layer writes to; the head's column
    0 turns it into a bias per token.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        scale = 1.0 if name == EMBEDDING else 1.5 * shape[1] ** -0.5
        weights[name] = torch.randn(shape, generator=generator) * scale
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name][0] = 0.0
    weights[EMBEDDING][:, 0] = 3.0
    weights[LM_HEAD][:, 0] = _word_bias(tokenizer)
    return weights


def _word_bias(tokenizer: Tokenizer) -> torch.Tensor:
    """Zero for tokens that are whole words or marks, strongly negative for fragments."""
    words = {f" {word}" for line in _LINES for word in line.replace(",", "").split()}
    kept = [_is_shown(tokenizer, token, words) for token in range(tokenizer.get_vocab_size())]
    return torch.where(torch.tensor(kept), 0.0, -20.0)


def _is_shown(tokenizer: Tokenizer, token: int, words: set[str]) -> bool:
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text in words or text in {".", ","}


if __name__ == "__main__":
    for parent, seed in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        ensure_tiny_checkpoint(Path(parent), int(seed))
