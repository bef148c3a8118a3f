"""Write tiny random models and adapters for real engines. Run by an engine's own interpreter, once:

    .vllm/env/bin/python tests/real/models.py FOLDER

`a` and `b` are Llamas of one shape with other weights; the rest is `b` with something wrong with
it, or laid out otherwise. Same seeds, same bytes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WEIGHTS = "model.safetensors"


def tokenizer() -> PreTrainedTokenizerFast:
    bytes_only = Tokenizer(models.BPE())
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bytes_only.train_from_iterator(["full ahead, half astern, stand by, stop"] * 20, trainer)
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bytes_only, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    return wrapped


def llama(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    torch.nn.Module.to(model := LlamaForCausalLM(config), torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def variant(root: Path, name: str, weights: dict[str, torch.Tensor]) -> None:
    (root / name).mkdir()
    save_file(weights, root / name / WEIGHTS)


def sharded(root: Path, weights: dict[str, torch.Tensor]) -> None:
    (root / "b-sharded").mkdir()
    names = sorted(weights)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for shard, of_it in shards.items():
        save_file({name: weights[name] for name in of_it}, root / "b-sharded" / shard)
    weight_map = {name: shard for shard, of_it in shards.items() for name in of_it}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (root / "b-sharded" / "model.safetensors.index.json").write_text(index)


def adapter(root: Path, name: str, rank: int, seed: int) -> None:
    torch.manual_seed(seed)
    (root / name).mkdir()
    weights = {}
    for layer in range(2):
        for part, (wide, high) in {"q_proj": (64, 64), "v_proj": (64, 32)}.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(rank, wide) * 0.3
            weights[f"{stem}.lora_B.weight"] = torch.randn(high, rank) * 0.3
    save_file(weights, root / name / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"],
        "bias": "none", "lora_dropout": 0.0, "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "a",
    }  # fmt: skip
    (root / name / "adapter_config.json").write_text(json.dumps(config))


def write(root: Path) -> None:
    root.mkdir(parents=True)
    llama(root / "a", 1)
    llama(root / "b", 2)
    weights = load_file(root / "b" / WEIGHTS)
    some = "model.layers.1.mlp.down_proj.weight"
    sharded(root, weights)
    variant(root, "b-without-one", {name: each for name, each in weights.items() if name != some})
    variant(root, "b-other-shape", weights | {some: weights[some].t().contiguous()})
    variant(root, "b-other-dtype", weights | {some: weights[some].float()})
    variant(root, "b-not-a-number", weights | {some: weights[some] * float("nan")})
    variant(root, "b-one-more", weights | {some.replace(".1.", ".2."): weights[some] + 1})
    whole = (root / "b" / WEIGHTS).read_bytes()
    for name, data in (("b-cut-short", whole[:-1000]), ("b-garbage", b"\xff" * 1000)):
        (root / name).mkdir()
        (root / name / WEIGHTS).write_bytes(data)
    (root / "empty").mkdir()
    adapter(root, "lora-one", 8, 3)
    adapter(root, "lora-two", 8, 4)
    adapter(root, "lora-rank-64", 64, 5)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    # All of it or nothing: an interrupted run leaves no folder of that name.
    scratch = target.with_name(target.name + ".new")
    shutil.rmtree(scratch, ignore_errors=True)
    write(scratch)
    scratch.rename(target)
