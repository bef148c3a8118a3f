"""Rotary positions: the frequencies that a configuration asks for, and the rotation itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from app.reference_engine.config import LinearScaling, Llama3Scaling, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3_frequencies(plain, scaling)


def _llama3_frequencies(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between them."""
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    width = scaling.high_freq_factor - scaling.low_freq_factor
    kept = (original / wavelength - scaling.low_freq_factor) / width
    blended = (1 - kept) * plain / scaling.factor + kept * plain
    scaled = torch.where(
        wavelength > original / scaling.low_freq_factor, plain / scaling.factor, plain
    )
    between = (wavelength >= original / scaling.high_freq_factor) & (
        wavelength <= original / scaling.low_freq_factor
    )
    return torch.where(between, blended, scaled)


def signed_sines(angles: Tensor) -> Tensor:
    """For :func:`rotated`: the sines of whole heads' angles, those of the first half negative."""
    sines = angles.sin()
    sines[..., : sines.shape[-1] // 2].neg_()
    return sines


def rotated(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary positions in the half-split layout of the Hugging Face checkpoints."""
    other = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, other, signed_sin)
