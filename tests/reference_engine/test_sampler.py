"""Sampling: filters, penalties, and randomness that is a function of seed and index alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.reference_engine.messages import Logprobs, Sampling
from app.reference_engine.sampler import NoFiniteLogits, sample, score, uniform

LOGITS = np.array([1.0, 3.0, 2.0, -1.0, 2.9, 0.0], dtype=np.float32)
seeds = st.integers(0, 2**64 - 1)
rows = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40).map(
    lambda values: np.array(values, dtype=np.float32)
)


def draw(logits: NDArray[np.float32], settings: Sampling, **context: Any) -> int:
    return sample(logits, settings, **{"prompt_ids": [], "output_ids": [], **context})


def frequencies(logits: NDArray[np.float32], count: int = 4000, **settings: Any) -> Counter[int]:
    return Counter(draw(logits, Sampling(seed=seed, **settings)) for seed in range(count))


@given(rows, seeds)
def test_greedy_takes_the_highest_and_the_lower_id_on_a_tie(
    logits: NDArray[np.float32], seed: int
) -> None:
    assert draw(logits, Sampling(temperature=0, seed=seed)) == int(logits.argmax())


@given(rows, seeds, st.integers(1, 45), st.floats(0.01, 1), st.floats(0, 1), st.floats(0.01, 4))
def test_only_what_every_filter_keeps_is_drawn(
    logits: NDArray[np.float32],
    seed: int,
    top_k: int,
    top_p: float,
    min_p: float,
    temperature: float,
) -> None:
    settings = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    token = draw(logits, settings)
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    better = int((weights > weights[token]).sum())
    assert better < top_k
    assert weights[token] >= min_p * (1 - 1e-9)
    assert weights[weights > weights[token]].sum() <= top_p * weights.sum() * (1 + 1e-9)


@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_tightest_filters_are_greedy(setting: dict[str, Any]) -> None:
    assert frequencies(LOGITS, 200, **setting) == {1: 200}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    found = frequencies(LOGITS, temperature=temperature)
    expected = torch.softmax(torch.from_numpy(LOGITS) / temperature, 0)
    for token, probability in enumerate(expected.tolist()):
        # Five standard deviations; the seeds are fixed, so this never flickers.
        spread = 5 * (4000 * probability * (1 - probability)) ** 0.5 + 1
        assert abs(found[token] - 4000 * probability) < spread


def test_a_tiny_temperature_neither_overflows_nor_surprises() -> None:
    assert frequencies(LOGITS, 100, temperature=1e-300) == {1: 100}


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    assert set(frequencies(logits, 500, top_p=0.45)) == {0}
    assert set(frequencies(logits, 500, top_p=0.6)) == {0, 1}
    assert set(frequencies(logits, 500, top_p=0.85)) == {0, 1, 2}


def test_penalties_against_their_definitions() -> None:
    assert draw(LOGITS, Sampling(temperature=0, repetition_penalty=1.2), prompt_ids=[1]) == 4
    negative = np.array([-1.0, -1.1], dtype=np.float32)
    assert draw(negative, Sampling(temperature=0, repetition_penalty=1.5), prompt_ids=[0]) == 1
    presence = Sampling(temperature=0, presence_penalty=0.2)
    assert draw(LOGITS, presence, prompt_ids=[1]) == 1, "the prompt does not count"
    assert draw(LOGITS, presence, output_ids=[1]) == 4
    frequency = Sampling(temperature=0, frequency_penalty=0.06)
    assert draw(LOGITS, frequency, output_ids=[1]) == 1
    assert draw(LOGITS, frequency, output_ids=[1, 1]) == 4


def test_banned_tokens_are_never_drawn() -> None:
    for seed in range(200):
        assert draw(LOGITS, Sampling(seed=seed), banned_ids=[1, 4]) not in {1, 4}


@given(seeds, st.integers(0, 10_000))
def test_randomness_is_a_function_of_seed_and_index(seed: int, index: int) -> None:
    assert uniform(seed, index) == uniform(seed, index)
    assert 0 <= uniform(seed, index) < 1
    assert uniform(seed, index) != uniform(seed, index + 1)


def test_indices_and_seeds_draw_independently() -> None:
    grid = np.array([[uniform(seed, index) for index in range(100)] for seed in range(100)])
    assert abs(grid.mean() - 0.5) < 0.02
    assert np.abs(np.corrcoef(grid)[np.triu_indices(100, 1)]).max() < 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_logits_are_told(bad: float) -> None:
    with pytest.raises(NoFiniteLogits):
        draw(np.array([0.0, bad], dtype=np.float32), Sampling())
    with pytest.raises(NoFiniteLogits):
        draw(np.array([-np.inf, -np.inf], dtype=np.float32), Sampling(temperature=0))


@given(rows, st.data())
def test_scores_are_those_of_log_softmax(logits: NDArray[np.float32], data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    chosen, candidates = score(logits, token, Logprobs(top_n=3))
    assert chosen.logprob == pytest.approx(float(expected[token]), abs=1e-9)
    assert chosen.place == 1 + int((logits > logits[token]).sum())
    ranked = np.argsort(-logits.astype(np.float64), kind="stable")
    assert [one.token_id for one in candidates] == ranked.tolist()[:3]
    _, (named,) = score(logits, token, Logprobs(token_ids=(token,)))
    assert named == chosen
