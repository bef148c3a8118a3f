"""The decoder against transformers' own Llama, on random configurations."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.reference_engine.model import KvCache, Llama, Span
from tests.reference_engine.checkpoints import cache_for, ours, random_llama, reference_logits

TOLERANCE = 1e-4
LONGEST = 48


@st.composite
def rope_parameters(draw: st.DrawFn) -> dict[str, Any]:
    theta = draw(st.sampled_from([100.0, 10_000.0, 500_000.0]))
    kind = draw(st.sampled_from(["default", "linear", "llama3"]))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        rope["factor"] = draw(st.sampled_from([2.0, 8.0]))
    if kind == "llama3":
        rope["low_freq_factor"] = draw(st.sampled_from([1.0, 1.5]))
        rope["high_freq_factor"] = draw(st.sampled_from([4.0, 3.0]))
        # Short, so that some wavelengths fall on either side and between the limits.
        rope["original_max_position_embeddings"] = draw(st.sampled_from([16, 64, 512]))
    return rope


@st.composite
def llama_settings(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 4]))
    head_dim = draw(st.sampled_from([8, 12, 16, 32]))
    wide = draw(st.booleans())
    return {
        "vocab_size": draw(st.integers(40, 130)),
        "hidden_size": heads * head_dim if wide else heads * 8,
        "intermediate_size": draw(st.integers(20, 90)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        "rope_parameters": draw(rope_parameters()),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }


class Paged:
    """Feeds sequences to our model in pieces, each sequence on scattered blocks of its own."""

    def __init__(
        self, model: Llama, cache: KvCache, tokens: list[list[int]], order: Random
    ) -> None:
        self.model = model
        self.cache = cache
        self.tokens = tokens
        self.done = [0] * len(tokens)
        free = list(range(cache.null_block))
        order.shuffle(free)
        each = len(free) // len(tokens)
        self.blocks = [free[at * each : (at + 1) * each] for at in range(len(tokens))]

    def step(self, counts: dict[int, int]) -> dict[int, torch.Tensor]:
        """Compute ``counts[sequence]`` more tokens of each; logits after the last of each."""
        fed: list[int] = []
        spans = []
        for which, count in counts.items():
            start = self.done[which]
            fed += self.tokens[which][start : start + count]
            spans.append(Span(start, count, self.blocks[which]))
            self.done[which] += count
        logits = self.model.forward(fed, spans, self.cache)
        return dict(zip(counts, logits, strict=True))


def random_steps(tokens: list[list[int]], order: Random) -> Iterator[dict[int, int]]:
    """Any mixture of prompt chunks and single tokens, until all sequences are through."""
    left = {which: len(one) for which, one in enumerate(tokens)}
    while left:
        chosen = order.sample(sorted(left), order.randint(1, len(left)))
        counts = {which: order.choice([1, 1, order.randint(1, left[which])]) for which in chosen}
        yield counts
        left = {which: n - counts.get(which, 0) for which, n in left.items()}
        left = {which: n for which, n in left.items() if n}


@settings(max_examples=40)
@given(
    given_settings=llama_settings(),
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 4, 8, 16, 24]),
    seed=st.integers(0, 2**32 - 1),
)
def test_logits_equal_transformers(
    given_settings: dict[str, Any], lengths: list[int], block_size: int, seed: int
) -> None:
    """However sequences are cut into chunks, batched and scattered over blocks."""
    order = Random(seed)
    reference = random_llama(seed, **given_settings)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        config, model = ours(Path(folder), LONGEST)
    tokens = [[order.randrange(config.vocab_size) for _ in range(n)] for n in lengths]
    blocks = len(tokens) * -(-LONGEST // block_size)
    paged = Paged(model, cache_for(config, blocks, block_size), tokens, order)
    expected = [reference_logits(reference, one) for one in tokens]
    for counts in random_steps(tokens, order):
        for which, logits in paged.step(counts).items():
            torch.testing.assert_close(
                logits, expected[which][paged.done[which] - 1], rtol=TOLERANCE, atol=TOLERANCE
            )


def test_older_configuration_keys_mean_the_same(tmp_path: Path) -> None:
    """`rope_theta` beside `rope_scaling`, as checkpoints before transformers 5 have them."""
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    reference = random_llama(
        3,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={**rope, "rope_theta": 500_000.0},
    )
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["rope_parameters"]
    del raw["head_dim"]
    raw |= {"rope_theta": 500_000.0, "rope_scaling": rope}
    path.write_text(json.dumps(raw))
    config, model = ours(tmp_path, LONGEST)
    tokens = list(range(40))
    cache = cache_for(config, 3, 16)
    logits = model.forward(tokens, [Span(0, 40, (0, 1, 2))], cache)[0]
    expected = reference_logits(reference, tokens)[-1]
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoint_is_computed_in_float32(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    reference = random_llama(
        5, vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=128,
    ).to(dtype)  # fmt: skip
    reference.save_pretrained(tmp_path)
    config, model = ours(tmp_path, LONGEST)
    logits = model.forward([1, 2, 3], [Span(0, 3, (0,))], cache_for(config, 1, 16))[0]
    expected = reference_logits(reference.to(torch.float32), [1, 2, 3])[-1]
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("block_size", [4, 16])
def test_batch_mates_do_not_change_a_result(tmp_path: Path, block_size: int) -> None:
    """To the last bit but one: a sampled stream would otherwise change with its company."""
    reference = random_llama(
        7, vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    reference.save_pretrained(tmp_path)
    config, model = ours(tmp_path, 256)
    order = Random(1)
    tokens = [[order.randrange(96) for _ in range(n)] for n in (90, 33, 17, 60, 5)]
    blocks = 640 // block_size
    alone = Paged(model, cache_for(config, blocks, block_size), tokens, Random(0))
    by_itself = [alone.step({0: 1})[0] for _ in range(90)]
    for seed in range(5):
        together = Paged(model, cache_for(config, blocks, block_size), tokens, Random(seed))
        for counts in random_steps(tokens, Random(seed)):
            if (logits := together.step(counts).get(0)) is not None:
                expected = by_itself[together.done[0] - 1]
                torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
