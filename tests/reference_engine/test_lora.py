"""Adapters in the decoder, against transformers' own Llama with the adapters in its weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.reference_engine.adapter_config import PROJECTIONS
from app.reference_engine.lora import Adapter
from app.reference_engine.model import KvCache, Llama, Span
from app.reference_engine.sharding import Layout
from app.reference_engine.tiny_adapter import write_tiny_adapter
from app.reference_engine.weights import load_part
from tests.reference_engine.adapters import Member, Threads, loading, merged_model, part_of
from tests.reference_engine.checkpoints import cache_for, ours, random_llama, reference_logits
from tests.reference_engine.test_model import llama_settings

TOLERANCE = 1e-4
LONGEST = 32
BLOCK = 16


@st.composite
def adapter_settings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "rank": draw(st.sampled_from([1, 2, 3, 8, 16, 20])),
        "alpha": draw(st.sampled_from([1, 2.5, 8])),
        "use_rslora": draw(st.booleans()),
        "targets": draw(st.lists(st.sampled_from(PROJECTIONS), min_size=1, unique=True)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
    }


@settings(max_examples=15)
@given(
    given_settings=llama_settings(),
    given_adapters=st.lists(adapter_settings(), min_size=2, max_size=2),
    length=st.integers(2, LONGEST),
    world_size=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_logits_equal_merged_weights(
    given_settings: dict[str, Any],
    given_adapters: list[dict[str, Any]],
    length: int,
    world_size: int,
    seed: int,
) -> None:
    """Three sequences share every step: one under each adapter, one under none."""
    heads, kv_heads = (given_settings[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    if heads % world_size or (kv_heads % world_size and world_size % kv_heads):
        world_size = 1
    reference = random_llama(seed, **given_settings)
    order = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "base"
        reference.save_pretrained(checkpoint)
        config, _ = ours(checkpoint, LONGEST)
        written = [
            write_tiny_adapter(checkpoint, Path(folder) / f"adapter{n}", seed + n, **wanted)
            for n, wanted in enumerate(given_adapters)
        ]
        orders = [loading(checkpoint, one, f"a{n}", n + 1) for n, one in enumerate(written)]
        group = Threads(world_size)
        layouts = [Layout(config, rank, world_size) for rank in range(world_size)]
        models = [
            Llama(
                config,
                load_part(checkpoint, layout),
                LONGEST,
                layout=layout,
                group=Member(group, layout.rank),
            )
            for layout in layouts
        ]
        parts = [[part_of(one, layout) for one in orders] for layout in layouts]
        expected = [merged_model(reference, one) for one in written] + [reference]
    tokens = [[order.randrange(config.vocab_size) for _ in range(length)] for _ in expected]
    caches = [cache_for(layout.local, 6, BLOCK) for layout in layouts]
    cut = order.randrange(1, length)
    for start, stop in ((0, cut), *((at, at + 1) for at in range(cut, length))):

        def step(rank: int, start: int = start, stop: int = stop) -> torch.Tensor:
            adapters: list[Adapter | None] = [*parts[rank], None]
            spans = [
                Span(start, stop - start, (2 * n, 2 * n + 1), adapter)
                for n, adapter in enumerate(adapters)
            ]
            fed = [token for one in tokens for token in one[start:stop]]
            return models[rank].forward(fed, spans, caches[rank])

        logits = group.run(step)[0]
        for n, model in enumerate(expected):
            wanted = reference_logits(model, tokens[n])[stop - 1]
            torch.testing.assert_close(logits[n], wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Llama:
    return ours(tiny, 128)[1]


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        part_of(
            loading(tiny, write_tiny_adapter(tiny, folder / str(n), n, rank=rank), str(n), n + 1),
            Layout(ours(tiny, 128)[0]),
        )
        for n, rank in enumerate((4, 24))
    ]


def cache_of(model: Llama) -> KvCache:
    return cache_for(model.config, 40, BLOCK)


def test_company_changes_nothing_bit_for_bit(model: Llama, adapters: list[Adapter]) -> None:
    """Neither for rows under an adapter nor for those under none, whatever shares their step."""
    order = Random(5)
    prompt = [order.randrange(model.config.vocab_size) for _ in range(21)]
    for mine in (None, *adapters):
        alone_cache = cache_of(model)
        alone = [
            model.forward(prompt[:20], [Span(0, 20, (0, 1), mine)], alone_cache),
            model.forward(prompt[20:], [Span(20, 1, (0, 1), mine)], alone_cache),
        ]
        for mates in range(1, 7):
            cache = cache_of(model)
            others = [(None, *adapters)[order.randrange(3)] for _ in range(mates)]
            lengths = [order.randint(1, 9) for _ in others]
            fed, spans = list(prompt[:20]), [Span(0, 20, (0, 1), mine)]
            for n, (other, count) in enumerate(zip(others, lengths, strict=True)):
                fed += [order.randrange(model.config.vocab_size) for _ in range(count)]
                spans.append(Span(0, count, (2 * n + 2, 2 * n + 3), other))
            assert torch.equal(model.forward(fed, spans, cache)[0], alone[0][0])
            fed = [prompt[20]] + [7] * mates
            spans = [Span(20, 1, (0, 1), mine)] + [
                Span(count, 1, (2 * n + 2, 2 * n + 3), other)
                for n, (other, count) in enumerate(zip(others, lengths, strict=True))
            ]
            assert torch.equal(model.forward(fed, spans, cache)[0], alone[1][0])


def test_parts_of_all_ranks_are_the_whole(tiny: Path, tmp_path: Path) -> None:
    """What the ranks hold together is each tensor once, and what is not divided, all of them."""
    config, _ = ours(tiny, 16)
    order = loading(tiny, write_tiny_adapter(tiny, tmp_path / "a", rank=4))
    whole = part_of(order, Layout(config))
    parts = [part_of(order, Layout(config, rank, 2)) for rank in range(2)]
    for module, change in whole.changes.items():
        mine = [part.changes[module] for part in parts]
        if module.endswith(("o_proj", "down_proj")):
            assert torch.equal(torch.cat([one.down for one in mine], 1), change.down)
            assert all(torch.equal(one.up, change.up) for one in mine)
        else:
            assert torch.equal(torch.cat([one.up for one in mine], 0), change.up)
            assert all(torch.equal(one.down, change.down) for one in mine)
    assert len({whole.sha256, *(part.sha256 for part in parts)}) == 3
