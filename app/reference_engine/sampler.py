"""The next token from a row of logits. Pure: the same row, settings and index give the same token.

Randomness is a function of the request's seed and the token's index in the output, so neither
batch mates nor a pause nor a preemption can change what a request draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.reference_engine.messages import Logprobs, Sampling

Row = NDArray[np.float32]
_Scores = NDArray[np.float64]

_MASK = (1 << 64) - 1


class NoFiniteLogits(Exception):
    """The model's output is not a distribution: weights or cache are damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A token's natural log probability and its place, counted from 1 = likeliest."""

    token_id: int
    logprob: float
    place: int


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64 of seed and index."""
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((state ^ (state >> 31)) >> 11) * 2.0**-53


def sample(
    logits: Row,
    sampling: Sampling,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    banned_ids: Sequence[int] = (),
) -> int:
    """The next token id. ``logits`` has one value per token of the vocabulary.

    Order: banned tokens out, penalties, then greedy at temperature 0; otherwise temperature,
    ``min_p``, ``top_k``, and ``top_p`` over what those left. Ties go to the lower id.
    """
    if sampling.temperature == 0.0 and not banned_ids and not _penalises(sampling):
        return _likeliest(logits)
    scores: _Scores = logits.astype(np.float64)
    if banned_ids:
        scores[list(banned_ids)] = -np.inf
    _penalise(scores, sampling, prompt_ids, output_ids)
    if sampling.temperature == 0.0:
        return _likeliest(scores)
    highest = float(scores.max())
    if not np.isfinite(highest):
        raise NoFiniteLogits
    # Relative to the highest: a tiny temperature then underflows to 0 instead of overflowing.
    scores = (scores - highest) / sampling.temperature
    weights = np.exp(_filter(scores, sampling))
    cumulative = np.cumsum(weights)
    target = uniform(sampling.seed, len(output_ids)) * cumulative[-1]
    return min(int(np.searchsorted(cumulative, target, side="right")), _last_kept(weights))


def score(logits: Row, token_id: int, wanted: Logprobs) -> tuple[Scored, tuple[Scored, ...]]:
    """The chosen token's score and the candidates': the ``top_n`` likeliest, else those named."""
    values: _Scores = logits.astype(np.float64)
    highest = float(values.max())
    total = highest + float(np.log(np.exp(values - highest).sum()))

    def of(one: int) -> Scored:
        place = 1 + int((values > values[one]).sum())
        return Scored(token_id=one, logprob=float(values[one]) - total, place=place)

    named: Sequence[int] = wanted.token_ids
    if wanted.top_n:
        named = [int(one) for one in np.argsort(-values, kind="stable")[: wanted.top_n]]
    return of(token_id), tuple(of(one) for one in named)


def _likeliest(scores: Row | _Scores) -> int:
    """The first of the highest; one that is no number counts as that."""
    likeliest = int(scores.argmax())
    if not np.isfinite(scores[likeliest]):
        raise NoFiniteLogits
    return likeliest


def _penalises(sampling: Sampling) -> bool:
    return bool(
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1.0
    )


def _penalise(
    scores: _Scores, sampling: Sampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> None:
    """Repetition counts prompt and output, frequency and presence the output alone."""
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.asarray([*prompt_ids, *output_ids], dtype=np.int64))
        values = scores[seen]
        factor = sampling.repetition_penalty
        scores[seen] = np.where(values > 0, values / factor, values * factor)
    if output_ids and (sampling.frequency_penalty or sampling.presence_penalty):
        ids, counts = np.unique(np.asarray(output_ids, dtype=np.int64), return_counts=True)
        scores[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _filter(scores: _Scores, sampling: Sampling) -> _Scores:
    """``scores`` with everything filtered out at minus infinity. The best one always stays at 0."""
    if sampling.min_p > 0.0:
        scores = np.where(scores >= np.log(sampling.min_p), scores, -np.inf)
    if 0 < sampling.top_k < len(scores):
        kept = np.argsort(-scores, kind="stable")[: sampling.top_k]
        scores = _only(scores, kept)
    if sampling.top_p < 1.0:
        order = np.argsort(-scores, kind="stable")
        mass = np.cumsum(np.exp(scores[order]))
        # The token that crosses the threshold belongs to the kept ones.
        crossing = int(np.searchsorted(mass, sampling.top_p * mass[-1], side="left"))
        scores = _only(scores, order[: crossing + 1])
    return scores


def _only(scores: _Scores, kept: NDArray[np.int64]) -> _Scores:
    filtered = np.full_like(scores, -np.inf)
    filtered[kept] = scores[kept]
    return filtered


def _last_kept(weights: _Scores) -> int:
    """Rounding can put the target at the very end, where only filtered tokens are left."""
    return int(np.flatnonzero(weights)[-1])
