"""What one rank holds of the model: its weights and its part of the KV cache.

The first rank computes what its scheduler plans, the others compute along; both through this.
"""

from __future__ import annotations

from app.reference_engine import messages as m
from app.reference_engine.config import ModelConfig
from app.reference_engine.model import KvCache, Llama, Span
from app.reference_engine.sampler import Row


class Holding:
    def __init__(self, model: Llama, cache: KvCache) -> None:
        self._model = model
        self._cache = cache

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        return self._model.layout.config

    def compute(self, plan: m.StepPlan) -> Row:
        """Logits after the last token of each span, [spans, vocabulary]; whole on the first rank.
        Raises PeerLost."""
        spans = [Span(one.start, one.count, one.blocks) for one in plan.spans]
        rows: Row = self._model.forward(plan.token_ids, spans, self._cache).numpy()
        return rows

    def probe(self) -> Row:
        """Logits of one forward pass that leaves no trace; all ranks have to do it at once."""
        span = m.StepSpan(0, 1, (self._cache.scratch_block,))
        return self.compute(m.StepPlan((0,), (span,)))
