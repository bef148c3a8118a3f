"""How one model is divided among the ranks of a tensor-parallel group. Pure: no tensor.

Attention is divided by heads, the MLP by inner channels, embedding and head by tokens. Each of
these needs one sum (or one join, for the logits) over the ranks; norms, and the biases that are
added after a sum, are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.reference_engine.config import ModelConfig
from app.reference_engine.errors import UnsupportedArchitecture

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Cut:
    """The part ``start`` … ``stop`` of dimension ``dim`` that a rank holds of a tensor."""

    dim: int
    start: int
    stop: int

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What is left of a whole tensor's shape."""
        return (*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :])


class Layout:
    """One rank's part of a model; rank 0 of 1 has all of it.

    Heads must divide evenly. Where there are fewer key-value heads than ranks, each is held by
    several ranks, and each of those has other query heads. Channels and tokens may divide unevenly.
    """

    def __init__(self, config: ModelConfig, rank: int = 0, world_size: int = 1) -> None:
        """Raises UnsupportedArchitecture when the heads can not be divided so."""
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads % world_size or (kv_heads % world_size and world_size % kv_heads):
            cause = f"{world_size} for {heads} heads and {kv_heads} key-value heads"
            raise UnsupportedArchitecture("tensor parallel size", cause)
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.heads = range(rank * heads // world_size, (rank + 1) * heads // world_size)
        sharing = heads // kv_heads
        self.kv_heads = range(self.heads.start // sharing, -(-self.heads.stop // sharing))
        self.channels = self.part(config.intermediate_size, rank)
        self.tokens = self.part(config.vocab_size, rank)

    @property
    def local(self) -> ModelConfig:
        """The configuration of the part alone; the vocabulary stays whole."""
        return replace(
            self.config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.channels),
        )

    def part(self, total: int, rank: int) -> range:
        """A rank's share of ``total`` things that may divide unevenly."""
        return range(rank * total // self.world_size, (rank + 1) * total // self.world_size)

    def cut(self, name: str) -> Cut | None:
        """Which part of that tensor this rank holds; None: all of it."""
        if self.world_size == 1:
            return None
        if name in (EMBEDDING, LM_HEAD):
            return _cut(0, self.tokens)
        module, _, kind = name.rpartition(".")
        dim = self.config.head_dim
        match module.rpartition(".")[2]:
            case "q_proj":
                return _cut(0, self.heads, dim)
            case "k_proj" | "v_proj":
                return _cut(0, self.kv_heads, dim)
            case "gate_proj" | "up_proj":
                return _cut(0, self.channels)
            case "o_proj" if kind == "weight":
                return _cut(1, self.heads, dim)
            case "down_proj" if kind == "weight":
                return _cut(1, self.channels)
        return None


def _cut(dim: int, part: range, width: int = 1) -> Cut:
    return Cut(dim, part.start * width, part.stop * width)
