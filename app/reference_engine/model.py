"""The Llama decoder over a paged KV cache in float32, whole or one rank's part of it.

One call computes any mix of prompt chunks and single decoding tokens of several sequences. A
token's result must not depend on what it is computed with (a sampled stream would change with its
batch mates), and matrix kernels choose their order of summation by shape. So rows and context
lengths are padded to shapes for which the kernels sum every row alike; the padding's own results
are thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody knows it by)
from torch import Tensor

from app.reference_engine.collective import Alone, Collective
from app.reference_engine.config import ModelConfig
from app.reference_engine.lora import NO_ADAPTERS, Adapter, StepAdapters
from app.reference_engine.rotary import inverse_frequencies, rotated, signed_sines
from app.reference_engine.sharding import EMBEDDING, FINAL_NORM, LM_HEAD, Layout

# Below four rows BLAS switches to matrix-vector kernels, which sum in another order.
_ROW_TILE = 4
# One full AVX-512 register of floats: reductions over a context have no scalar remainder.
_CONTEXT_TILE = 16
CPU = torch.device("cpu")


class Span(NamedTuple):
    """``count`` new tokens of one sequence, the first at position ``start``; ``blocks`` hold the
    sequence's KV in order and reach at least to the last new token. ``adapter`` None: the weights
    alone."""

    start: int
    count: int  # type: ignore[assignment] # what a tuple calls count is not used of this one
    blocks: Sequence[int]
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class _Linear:
    """One projection, or several of the same inputs as one matrix, with the outputs of each."""

    weight: Tensor
    bias: Tensor | None
    modules: tuple[tuple[str, slice], ...] = ()

    def __call__(self, rows: Tensor, adapters: StepAdapters = NO_ADAPTERS) -> Tensor:
        return self._add(adapters, rows, F.linear(rows, self.weight, self.bias))

    def onto(
        self, hidden: Tensor, rows: Tensor, group: Collective, adapters: StepAdapters
    ) -> Tensor:
        """What is added to ``hidden``, where the ranks divide the inputs among themselves: that and
        the bias come in once, after the sum."""
        if group.alone:
            total = self._add(adapters, rows, torch.addmm(hidden, rows, self.weight.t()))
        else:
            total = hidden + group.sum(self._add(adapters, rows, F.linear(rows, self.weight)))
        return total if self.bias is None else total + self.bias

    def _add(self, adapters: StepAdapters, rows: Tensor, result: Tensor) -> Tensor:
        if adapters is not NO_ADAPTERS:
            for module, outputs in self.modules:
                adapters.add(module, rows, result[:, outputs])
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention_norm: Tensor
    heads: _Linear  # query, key, value
    output: _Linear
    mlp_norm: Tensor
    inner: _Linear  # gate, up
    down: _Linear


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans of equal ``count``, attended to together. ``rows`` are those of the step's tokens.

    ``blocks`` has those of one context after the other, all equally many. ``mask`` is added to the
    scores: [kv heads * spans, shared heads * count, padded to whole row tiles, context]; what is
    the same for all kv heads (one span) or for all shared heads (``count`` 1) is there once.
    """

    rows: Sequence[int]
    spans: int
    count: int
    blocks: Tensor
    mask: Tensor


class KvCache:
    """Keys and values of all layers: ``cells`` [layer, 2 * kv heads, block, position in block,
    head_dim], the keys' heads first, so that a step writes and reads both at once.

    One block beyond the pool's stays zero for ever: padded contexts read it. A second one takes
    the writes of probes. ``config`` is the local one of a rank that holds a part.
    """

    def __init__(
        self, config: ModelConfig, blocks: int, block_size: int, device: torch.device = CPU
    ) -> None:
        self.block_size = block_size
        self.null_block = blocks
        self.scratch_block = blocks + 1
        shape = (
            config.num_layers,
            2 * config.num_kv_heads,
            blocks + 2,
            block_size,
            config.head_dim,
        )
        self.use(torch.zeros(shape, device=device))

    def use(self, cells: Tensor) -> None:
        """Other memory of the same shape."""
        self.cells = cells
        self.keys, self.values = cells.chunk(2, dim=1)
        self.layers = cells.unbind()
        self.slots = [layer.flatten(1, 2) for layer in self.layers]

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int) -> int:
        """Memory of one block over all layers, keys and values together."""
        return 2 * 4 * config.num_layers * config.num_kv_heads * block_size * config.head_dim


class Llama:
    """Weights by their checkpoint names, plus the tables that follow from the configuration.

    With a ``layout`` of several ranks the weights are this rank's part, and ``group`` is where the
    parts meet: all ranks then make the same calls. ``max_positions`` bounds the positions that may
    be asked for. Without weights it only serves to make others that have some. Not thread-safe.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor] | None,
        max_positions: int,
        *,
        layout: Layout | None = None,
        group: Collective | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.layout = layout or Layout(config)
        self.config = self.layout.local
        self._group = group or Alone()
        self._widths = [
            len(self.layout.part(config.vocab_size, rank)) for rank in range(self.layout.world_size)
        ]
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim))
        angles = torch.cat((angles, angles), dim=-1)
        self.device = device
        self._angles = torch.stack((angles.cos(), signed_sines(angles)), dim=1).to(device)
        self._still = torch.tensor([1.0, 0.0], device=device).view(1, 2, 1, 1)
        self._zero, self._hides, self._eps = torch.tensor(
            [0.0, -math.inf, config.rms_norm_eps], device=device
        ).unbind()
        self._scale = config.head_dim**-0.5
        if weights is not None:
            self._use(weights)

    def with_weights(self, weights: Mapping[str, Tensor]) -> Llama:
        """The same model with other weights, beside this one; the tables are shared."""
        other = copy(self)
        other._use(weights)
        return other

    def _use(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)
        self._embedding = self.weights[EMBEDDING]
        self._final_norm = self.weights[FINAL_NORM]
        head = EMBEDDING if self.config.tie_word_embeddings else LM_HEAD
        self._head = _Linear(self.weights[head], None)
        self._layers = tuple(self._layer(number) for number in range(self.config.num_layers))

    @property
    def parameters(self) -> int:
        """Count of weights held."""
        return sum(tensor.numel() for tensor in self.weights.values())

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], spans: Sequence[Span], cache: KvCache) -> Tensor:
        """Logits after the last token of each span, float32 on the CPU, [spans, vocabulary].

        ``token_ids`` has the spans' new tokens one after the other. Their keys and values are
        written to the cache. The first rank alone has all of the vocabulary.
        """
        size = cache.block_size
        positions = [at for span in spans for at in range(span.start, span.start + span.count)]
        slots = [
            span.blocks[at // size] * size + at % size
            for span in spans
            for at in range(span.start, span.start + span.count)
        ]
        real = len(token_ids)
        padding = -real % _ROW_TILE
        more = [0] * padding
        ids, at, slot_of = self._tensor(
            [[*token_ids, *more], [*positions, *more], [*slots, *more]]
        ).unbind()
        cos, sin = self._turns(at)
        slot_of = slot_of[:real]
        groups = [self._as_group(chosen, rows, cache) for chosen, rows in _grouped(spans)]
        adapters = self._adapters(spans)
        whole = len(groups) == 1 and not padding  # its rows are all there are, in their order
        rows_of = [] if whole else [self._tensor(group.rows) for group in groups]
        query_heads = self.config.num_heads
        hidden = self._embed(ids)
        for layer, cells, slots_of in zip(self._layers, cache.layers, cache.slots, strict=True):
            normed = self._norm(hidden, layer.attention_norm)
            heads = layer.heads(normed, adapters).view(len(ids), -1, self.config.head_dim)
            heads = rotated(heads, cos, sin)
            query, fresh = heads[:, :query_heads], heads[:real, query_heads:]
            slots_of.index_copy_(1, slot_of, fresh.transpose(0, 1))
            if whole:
                attended = self._attend(query, cells, groups[0])
            else:
                attended = torch.zeros_like(query)
                for group, chosen in zip(groups, rows_of, strict=True):
                    rows = query.index_select(0, chosen)
                    attended.index_copy_(0, chosen, self._attend(rows, cells, group))
            hidden = layer.output.onto(hidden, attended.flatten(1), self._group, adapters)
            normed = self._norm(hidden, layer.mlp_norm)
            gate, up = layer.inner(normed, adapters).chunk(2, dim=-1)
            inner = F.silu(gate) * up
            hidden = layer.down.onto(hidden, inner, self._group, adapters)
        if real > len(spans) or padding:  # not each row is the last of a span
            ends = [-1]
            for span in spans:
                ends.append(ends[-1] + span.count)
            last = ends[1:] + [0] * (-len(spans) % _ROW_TILE)
            hidden = hidden.index_select(0, self._tensor(last))
        normed = self._norm(hidden, self._final_norm)
        return self._group.join(self._head(normed)[: len(spans)], self._widths).cpu()

    def _embed(self, ids: Tensor) -> Tensor:
        """Each rank has the rows of its own tokens; the others' are zero, and the sum is exact."""
        own = self.layout.tokens
        if len(own) == self.config.vocab_size:
            return self._embedding.index_select(0, ids)
        inside = (ids >= own.start) & (ids < own.stop)
        rows = self._embedding.index_select(0, (ids - own.start).clamp(0, len(own) - 1))
        return self._group.sum(rows.masked_fill(~inside.unsqueeze(-1), 0.0))

    def _adapters(self, spans: Sequence[Span]) -> StepAdapters:
        """Which rows of the step belong to which adapter. As many rows as are computed together
        are padded, here too: with the first one's, again and again."""
        found: dict[str, tuple[Adapter, list[int]]] = {}
        at = 0
        for span in spans:
            if span.adapter is not None:
                _, rows = found.setdefault(span.adapter.key, (span.adapter, []))
                rows.extend(range(at, at + span.count))
            at += span.count
        if not found:
            return NO_ADAPTERS
        return StepAdapters(
            [
                (self._tensor([*rows, *rows[:1] * (-len(rows) % _ROW_TILE)]), len(rows), adapter)
                for adapter, rows in found.values()
            ]
        )

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    def _turns(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for whole rows of heads, [rows, heads, head_dim]: the values' heads,
        which are not turned, have 1 and 0, and so need not be taken apart from the others."""
        turning = self.config.num_heads + self.config.num_kv_heads
        turned = self._angles.index_select(0, at).unsqueeze(2).expand(-1, -1, turning, -1)
        still = self._still.expand(len(at), -1, self.config.num_kv_heads, self.config.head_dim)
        cos, sin = torch.cat((turned, still), dim=2).unbind(dim=1)
        return cos, sin

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The root mean square norm, in fewer operations than torch's own takes on a CPU."""
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / rows.shape[-1]).rsqrt_()
        return torch.mul(rows, scale).mul_(weight)

    def _attend(self, query: Tensor, cells: Tensor, group: _Group) -> Tensor:
        """Attention of one group: [rows, heads, head_dim] in and out.

        The query heads that share a key-value head become rows of one matrix, so their keys are
        read once: [kv head, span, shared heads * count, context].
        """
        kv_heads, dim = self.config.num_kv_heads, self.config.head_dim
        shared = self.config.num_heads // kv_heads
        spans, count = group.spans, group.count
        rows = query.view(spans, count, kv_heads, shared, dim)
        rows = rows.permute(2, 0, 3, 1, 4).reshape(kv_heads * spans, shared * count, dim)
        padding = -(shared * count) % _ROW_TILE
        if padding:
            rows = F.pad(rows, (0, 0, 0, padding))
        # Ten times as fast as indexing: whole blocks are copied, not element by element.
        context = cells.index_select(1, group.blocks)
        key, value = context.view(2, kv_heads * spans, -1, dim).unbind()
        scores = torch.baddbmm(group.mask, rows, key.transpose(-1, -2), alpha=self._scale)
        mixed = torch.bmm(torch.softmax(scores, dim=-1), value)[:, : shared * count]
        mixed = mixed.view(kv_heads, spans, shared, count, dim).permute(1, 3, 0, 2, 4)
        return mixed.reshape(spans * count, kv_heads * shared, dim)

    def _as_group(self, spans: Sequence[Span], rows: Sequence[int], cache: KvCache) -> _Group:
        count, size = spans[0].count, cache.block_size
        kv_heads = self.config.num_kv_heads
        shared = self.config.num_heads // kv_heads
        tile = math.lcm(size, _CONTEXT_TILE)
        end = max(span.start for span in spans) + count
        wide = -(-end // tile) * (tile // size)
        blocks = [
            block
            for span in spans
            for used in (-(-(span.start + count) // size),)
            for block in (*span.blocks[:used], *(cache.null_block,) * (wide - used))
        ]
        # Position p of a span sees contexts 0 … p; what lies beyond is padding or not computed yet.
        positions = self._tensor([range(span.start, span.start + count) for span in spans])
        hidden = torch.arange(wide * size, device=self.device) > positions.unsqueeze(-1)
        mask = torch.where(hidden, self._hides, self._zero)
        mask = mask.repeat(kv_heads if len(spans) > 1 else 1, shared if count > 1 else 1, 1)
        if count > 1:
            mask = F.pad(mask, (0, 0, 0, -(shared * count) % _ROW_TILE))
        return _Group(rows, len(spans), count, self._tensor(blocks), mask)

    def _layer(self, number: int) -> _Layer:
        at = f"model.layers.{number}"

        def linear(*names: str) -> _Linear:
            """The weights by their names become parts of one matrix; a step then has half as many
            products of matrices, each of which costs much beside its arithmetic."""
            modules = [f"{at}.{name}" for name in names]
            weight, outputs = self._joined([f"{module}.weight" for module in modules])
            bias = None
            if f"{modules[0]}.bias" in self.weights:
                bias, _ = self._joined([f"{module}.bias" for module in modules])
            return _Linear(weight, bias, tuple(zip(modules, outputs, strict=True)))

        return _Layer(
            attention_norm=self.weights[f"{at}.input_layernorm.weight"],
            heads=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            output=linear("self_attn.o_proj"),
            mlp_norm=self.weights[f"{at}.post_attention_layernorm.weight"],
            inner=linear("mlp.gate_proj", "mlp.up_proj"),
            down=linear("mlp.down_proj"),
        )

    def _joined(self, names: Sequence[str]) -> tuple[Tensor, list[slice]]:
        """The weights one below the other, and the rows of each; they are views of it then."""
        parts = [self.weights[name] for name in names]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        outputs, begin = [], 0
        for name, part in zip(names, parts, strict=True):
            outputs.append(slice(begin, begin + len(part)))
            self.weights[name] = joined[outputs[-1]]
            begin += len(part)
        return joined, outputs


def _grouped(spans: Sequence[Span]) -> Iterator[tuple[Sequence[Span], Sequence[int]]]:
    """All decoding tokens together; each prompt chunk by itself, since lengths differ. With the
    rows of the step that they are."""
    singles, rows, at = list[Span](), list[int](), 0
    for span in spans:
        if span.count == 1:
            singles.append(span)
            rows.append(at)
        at += span.count
    if singles:
        yield singles, rows
    at = 0
    for span in spans:
        if span.count > 1:
            yield (span,), range(at, at + span.count)
        at += span.count
