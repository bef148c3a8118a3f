"""What one rank holds of the model: its weights and its part of the KV cache.

The first rank computes what its scheduler plans, the others compute along; both through this.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.reference_engine import messages as m
from app.reference_engine.change_orders import Resource
from app.reference_engine.config import ModelConfig
from app.reference_engine.errors import OrderRefused
from app.reference_engine.handoff_messages import KvExport, KvSource, KvWritten
from app.reference_engine.host_memory import HostCopy, bytes_of, memory_in_use, sha256_of
from app.reference_engine.kv_parts import read_part, write_part
from app.reference_engine.lora import Adapter, packed
from app.reference_engine.model import KvCache, Llama, Span
from app.reference_engine.sampler import Row

# Nobody collects for a request whose caller left at the last moment.
_WRITTEN_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Held:
    """All of it as one value, so that a commit and its undoing are one assignment each.

    ``model`` and ``cache`` are None while released, the weights also while they are missing;
    ``kept_…`` are the copies that a release preserved. ``sha256`` belongs to the weights that are
    live or kept, empty when there are none. ``adapters`` by name: part of the weights, they are
    released and kept together with them.
    """

    model: Llama | None
    cache: KvCache | None
    sha256: str
    kept_weights: HostCopy | None = None
    kept_cache: HostCopy | None = None
    released: frozenset[Resource] = frozenset()
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    @property
    def preserved(self) -> frozenset[Resource]:
        copies = {Resource.WEIGHTS: self.kept_weights, Resource.KV_CACHE: self.kept_cache}
        return frozenset(resource for resource, copy in copies.items() if copy is not None)


class Holding:
    """``bare`` is the model without weights; ``new_cache`` makes an empty cache."""

    def __init__(
        self, bare: Llama, weights: dict[str, Tensor] | None, new_cache: Callable[[], KvCache]
    ) -> None:
        self.bare = bare
        self.new_cache = new_cache
        self.around_step: Callable[[], AbstractContextManager[None]] = nullcontext
        self.unsettled = False
        self._rank = bare.layout.rank
        self._written: OrderedDict[str, KvWritten | str] = OrderedDict()
        model = None if weights is None else bare.with_weights(weights)
        cache = new_cache()
        # A step that leaves no trace.
        self.probe_plan = m.StepPlan((0,), (m.StepSpan(0, 1, (cache.scratch_block,)),))
        self.held = Held(model, cache, "" if weights is None else sha256_of(weights))

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        return self.bare.layout.config

    @property
    def able(self) -> bool:
        """Whether a step can be computed now."""
        whole = self.held.model is not None and self.held.cache is not None
        return whole and not self.unsettled

    def compute(self, plan: m.StepPlan) -> Row:
        """Logits after the last token of each span, [spans, vocabulary]; whole on the first rank.
        Raises PeerLost, or OrderRefused when weights or cache are not there."""
        model, cache = self.held.model, self.held.cache
        if model is None or cache is None or self.unsettled:
            raise OrderRefused("weights or KV cache are not there")
        spans = [
            Span(one.start, one.count, one.blocks, self._adapter(one.adapter)) for one in plan.spans
        ]
        for arriving in plan.imports:
            self.check_weights(arriving.source, arriving.adapter)
            part = arriving.source.parts[self._rank]
            read_part(cache, arriving.blocks, arriving.source.tokens, part)
        with self.around_step():
            rows: Row = model.forward(plan.token_ids, spans, cache).numpy()
        for leaving in plan.exports:
            self._write(leaving, cache)
        return rows

    def check_weights(self, source: KvSource, adapter: int) -> None:
        """Raises OrderRefused for KV that these weights, with that adapter, did not compute."""
        ranks = self.bare.layout.world_size
        if len(source.weights) != ranks or source.weights[self._rank] != self._weights(adapter):
            raise OrderRefused("the KV was computed by other weights")

    def _weights(self, number: int) -> str:
        """What stands for the weights with an adapter. Names and numbers are each engine's own."""
        adapter = self._adapter(number)
        if adapter is None:
            return self.held.sha256
        return hashlib.sha256(f"{self.held.sha256} {adapter.sha256}".encode()).hexdigest()

    def collect(self, request_id: str) -> KvWritten:
        """What was written for a request, once. Raises OrderRefused where that failed."""
        written = self._written.pop(request_id, None)
        if not isinstance(written, KvWritten):
            raise OrderRefused(written or "no KV was written for that request")
        return written

    def _write(self, leaving: KvExport, cache: KvCache) -> None:
        """A part that can not be written fails its request, and not the rank."""
        written: KvWritten | str
        try:
            size, sha256 = write_part(
                cache, leaving.blocks, leaving.tokens, leaving.parts[self._rank]
            )
            weights = self._weights(leaving.adapter)
            written = KvWritten(bytes=size, sha256=sha256, weights=weights)
        except OSError as error:
            written = f"the KV can not be written: {error.strerror}"
        self._written[leaving.request_id] = written
        while len(self._written) > _WRITTEN_REMEMBERED:
            self._written.popitem(last=False)

    def _adapter(self, number: int) -> Adapter | None:
        if not number:
            return None
        for adapter in self.held.adapters.values():
            if adapter.loaded.number == number:
                return adapter
        raise OrderRefused("an adapter is not there")

    @property
    def device(self) -> torch.device:
        return self.bare.device

    def live_sha256(self) -> str:
        """Computed from the bytes as they are now; empty without live weights."""
        return "" if self.held.model is None else sha256_of(self.held.model.weights)

    def bytes_held(self, resource: Resource) -> int:
        """What the tensors of a resource measure."""
        if resource is Resource.WEIGHTS:
            weights = 0 if self.held.model is None else bytes_of(self.held.model.weights)
            return weights + bytes_of(packed(self.held.adapters.values()))
        return 0 if self.held.cache is None else bytes_of(cache_tensors(self.held.cache))

    def memory(self) -> m.RankMemory:
        return m.RankMemory(
            weights=self.bytes_held(Resource.WEIGHTS),
            kv_cache=self.bytes_held(Resource.KV_CACHE),
            kept=self.bytes_kept,
            in_use=memory_in_use(self.device),
        )

    @property
    def bytes_kept(self) -> int:
        copies = (self.held.kept_weights, self.held.kept_cache)
        return sum(copy.bytes for copy in copies if copy is not None)


def cache_tensors(cache: KvCache) -> dict[str, Tensor]:
    return {"cells": cache.cells}
