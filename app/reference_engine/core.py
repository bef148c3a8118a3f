"""One rank's engine: orders in, steps taken, reports out. Synchronous, single-threaded, no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np

from app.reference_engine import change_orders as c
from app.reference_engine import messages as m
from app.reference_engine.adapter_orders import PrepareLoad, PrepareUnload, leaving
from app.reference_engine.cache_changes import CacheChanged
from app.reference_engine.errors import OrderRefused
from app.reference_engine.handoff_messages import (
    CollectKv,
    DeliverKv,
    KvDelivered,
    KvExport,
    KvImport,
    KvSource,
)
from app.reference_engine.holding import Holding
from app.reference_engine.output import Output
from app.reference_engine.sampler import NoFiniteLogits, Row, Scored, sample, score
from app.reference_engine.scheduler import Chunk, Scheduler, Sequence
from app.reference_engine.shape_orders import BesideSteps, SetLimits, WriteWeights
from app.reference_engine.staging import Staging
from app.reference_engine.tokenizer import Tokenizer
from app.reference_engine.weight_parts import writing


class EngineCore:
    """Holds scheduler, model and outputs together.

    Every accepted request ends in exactly one ``Finished`` or ``Failed`` report.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        holding: Holding,
        tokenizer: Tokenizer,
        announce: Callable[[m.StepPlan], None] = lambda _plan: None,
    ) -> None:
        """``announce`` hands each step to the other ranks, before this one begins it."""
        self._scheduler = scheduler
        self._holding = holding
        self._staging = Staging(holding)
        self._preparation: c.Preparation | None = None
        self._tokenizer = tokenizer
        self._announce = announce
        self._outputs: dict[str, Output] = {}
        # Frozen, the same each time, and made for each token of each request otherwise.
        self._plain: dict[int, m.OutputToken] = {}
        self._closed_message = ""
        self._batch_sizes = (0, 0)
        self._steps = 0

    @property
    def runnable(self) -> bool:
        """Whether :meth:`step` has something to do."""
        return self._scheduler.runnable and self._holding.able

    def prepare(self, order: BesideSteps) -> Callable[[], m.Result]:
        """Begin a change of what the ranks hold; see :meth:`Staging.begin`."""
        if isinstance(order, WriteWeights):
            return writing(self._holding, order)
        if isinstance(order, c.StagePiece):
            return self._staging.begin(order)
        self._check_idle(order)
        work = self._staging.begin(order)
        self._preparation = order
        return work

    def apply(self, order: m.Order) -> tuple[m.Result, list[m.RequestReport]]:
        """Carry out one order between two steps. Raises :class:`OrderRefused`."""
        match order:
            case m.Submit(request):
                return self._submit(request)
            case m.Abort(request_ids=ids, message=message):
                return self._abort(ids, message)
            case m.SetGate():
                return self._set_gate(order)
            case m.FlushPrefixCache():
                count = self._scheduler.flush()
                return m.PrefixFlushed(blocks_freed=count.freed, blocks_in_use=count.in_use), []
            case m.ReadLoad():
                return self._load(), []
            case m.Probe():
                self._probe()
                return m.Done(), []
            case m.Shutdown():
                return m.Done(), []
            case SetLimits():
                self._scheduler.set_limits(order.max_running, order.max_batched_tokens)
                return m.Done(), []
            case DeliverKv(request_id, source):
                return self._deliver(request_id, source), []
            case CollectKv(request_id):
                return self._holding.collect(request_id), []
            case c.CommitChange(change_id):
                return self._commit(change_id), []
            case c.UndoChange(change_id):
                # It may have been computed by the weights that are given up.
                self._scheduler.drop_arrivals()
                return self._staging.undo(change_id), []
            case c.SettleChange(change_id):
                return self._staging.settle(change_id), []
            case (
                c.PrepareRelease()
                | c.PrepareRestore()
                | c.PrepareUpdate()
                | c.StagePiece()
                | PrepareLoad()
                | PrepareUnload()
                | WriteWeights()
            ):
                return self.prepare(order)(), []
            case _:
                raise OrderRefused("this is no order for the core")

    def cache_changes(self) -> list[CacheChanged]:
        """What orders and steps did to the prefix cache since the last call; empty or one."""
        changes = self._scheduler.cache_changes()
        return [CacheChanged(changes)] if changes else []

    def step(self) -> list[m.RequestReport]:
        """Compute one batch; what it adds to each request."""
        chunks = self._scheduler.plan() if self.runnable else ()
        if not chunks:
            return []
        token_ids: list[int] = []
        for chunk in chunks:
            token_ids += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
        spans = [
            m.StepSpan(
                chunk.start, chunk.count, tuple(chunk.sequence.blocks), chunk.sequence.adapter
            )
            for chunk in chunks
        ]
        imports, exports = _handed_over(chunks)
        plan = m.StepPlan(tuple(token_ids), tuple(spans), imports, exports)
        self._announce(plan)
        rows = self._holding.compute(plan)
        self._scheduler.advance(chunks)
        self._steps += 1
        decoding = sum(1 for chunk in chunks if chunk.start >= chunk.sequence.prompt_length)
        self._batch_sizes = (len(chunks) - decoding, decoding)
        reports: list[m.RequestReport] = []
        for chunk, row in zip(chunks, rows, strict=True):
            if chunk.last:
                reports += self._extend(chunk, row)
        return reports

    def _extend(self, chunk: Chunk, row: Row) -> list[m.RequestReport]:
        """Sample the sequence's next token from its row of logits."""
        sequence, request = chunk.sequence, chunk.sequence.request
        if request.export_to and np.isfinite(row.max()):
            usage = self._take_out(sequence)
            return [m.Prefilled(request_id=request.request_id, usage=usage)]
        output = self._outputs[sequence.request_id]
        try:
            token_id = sample(
                row,
                request.sampling,
                prompt_ids=request.prompt_ids,
                output_ids=sequence.tokens[sequence.prompt_length :],
                banned_ids=output.banned_ids,
            )
        except NoFiniteLogits:
            usage = self._take_out(sequence)
            message = "the model's output is not a distribution"
            return [
                m.Failed(
                    request_id=request.request_id, message=message, retryable=False, usage=usage
                )
            ]
        step = output.push(token_id)
        self._scheduler.append(sequence, token_id)
        tokens = (self._output_token(row, token_id, request),) if step.show_token else ()
        reports: list[m.RequestReport] = []
        if tokens or step.text:
            reports.append(m.Tokens(request_id=request.request_id, tokens=tokens, text=step.text))
        if step.reason is not None:
            reports.append(
                m.Finished(
                    request_id=request.request_id,
                    reason=step.reason,
                    usage=self._take_out(sequence),
                    stop=step.stop,
                )
            )
        return reports

    def _output_token(self, row: Row, token_id: int, request: m.GenerationRequest) -> m.OutputToken:
        if request.logprobs is None:
            plain = self._plain.get(token_id)
            if plain is None:
                text = self._tokenizer.token_text(token_id)
                plain = self._plain[token_id] = m.OutputToken(token_id=token_id, text=text)
            return plain
        text = self._tokenizer.token_text(token_id)
        chosen, candidates = score(row, token_id, request.logprobs)
        return m.OutputToken(
            token_id=token_id,
            text=text,
            logprob=chosen.logprob,
            place=chosen.place,
            candidates=self._candidates(candidates),
        )

    def _candidates(self, scored: Many[Scored]) -> tuple[m.Candidate, ...]:
        return tuple(
            m.Candidate(
                token_id=one.token_id,
                text=self._tokenizer.token_text(one.token_id),
                logprob=one.logprob,
                place=one.place,
            )
            for one in scored
        )

    def _submit(self, request: m.GenerationRequest) -> tuple[m.Result, list[m.RequestReport]]:
        number, label = 0, ""
        if request.adapter:
            adapter = self._holding.held.adapters.get(request.adapter)
            if adapter is None:
                return m.Submitted(m.SubmitStatus.UNKNOWN_ADAPTER), []
            number, label = adapter.loaded.number, adapter.key
        status = self._scheduler.submit(request, adapter=number, label=label)
        if status is not m.SubmitStatus.ACCEPTED:
            return m.Submitted(status), []
        self._outputs[request.request_id] = Output(
            self._tokenizer,
            request.prompt_ids,
            request.stopping,
            self._holding.config.eos_token_ids,
        )
        # Let in before the gate closed, but behind it in the log: it ends as the others did.
        if self._scheduler.gate is m.Gate.CLOSED:
            _, reports = self._abort((request.request_id,), self._closed_message)
            return m.Submitted(status), reports
        return m.Submitted(status), []

    def _deliver(self, request_id: str, source: KvSource) -> m.Result:
        sequence = self._scheduler.find(request_id)
        if sequence is None:
            return KvDelivered(taken=False)
        self._holding.check_weights(source, sequence.adapter)
        return KvDelivered(self._scheduler.deliver(request_id, source))

    def _abort(
        self, ids: tuple[str, ...] | None, message: str
    ) -> tuple[m.Aborted, list[m.RequestReport]]:
        if ids is None:
            ids = tuple(one.request_id for one in self._scheduler.sequences())
        outcomes = []
        reports: list[m.RequestReport] = []
        for request_id in ids:
            outcomes.append(m.AbortOf(request_id, self._scheduler.status_of(request_id)))
            if (sequence := self._scheduler.find(request_id)) is not None:
                reports += self._cancel(sequence, message)
        return m.Aborted(tuple(outcomes)), reports

    def _cancel(self, sequence: Sequence, message: str) -> list[m.RequestReport]:
        text = self._outputs[sequence.request_id].cancel()
        reports: list[m.RequestReport] = []
        if text:
            reports.append(m.Tokens(request_id=sequence.request_id, tokens=(), text=text))
        reports.append(
            m.Finished(
                request_id=sequence.request_id,
                reason=m.FinishReason.CANCELLED,
                usage=self._take_out(sequence),
                message=message,
            )
        )
        return reports

    def _set_gate(self, order: m.SetGate) -> tuple[m.Result, list[m.RequestReport]]:
        live = self._scheduler.live
        if order.only_if_idle and live:
            raise OrderRefused(f"{live} requests are in flight")
        reports: list[m.RequestReport] = []
        if order.gate is m.Gate.CLOSED:
            _, reports = self._abort(None, order.message)
            self._closed_message = order.message
        previous = self._scheduler.set_gate(order.gate)
        was_frozen = previous is m.Gate.FROZEN
        result = m.GateSet(
            previous=previous,
            aborted=live if order.gate is m.Gate.CLOSED else 0,
            kept=live if order.gate is m.Gate.FROZEN else 0,
            continued=live if order.gate is m.Gate.OPEN and was_frozen else 0,
        )
        return result, reports

    def _load(self) -> m.LoadNumbers:
        prefill, decode = self._batch_sizes if self._scheduler.runnable else (0, 0)
        return dataclasses.replace(
            self._scheduler.load(),
            prefill_batch_size=prefill,
            decode_batch_size=decode,
            steps=self._steps,
            memory=self._holding.memory(),
        )

    def _probe(self) -> None:
        """Announced like a step: the others compute along because this rank does, or not at all."""
        if not self._holding.able:
            raise OrderRefused("weights or KV cache are not there")
        plan = self._holding.probe_plan
        self._announce(plan)
        if not bool(np.isfinite(self._holding.compute(plan)).all()):
            raise OrderRefused("the model's output is not finite")

    def _check_idle(self, order: c.Preparation | None) -> None:
        """What requests in flight need can not be taken from under them."""
        for name in leaving(order):
            adapter = self._holding.held.adapters.get(name)
            if adapter is not None and self._scheduler.users_of(adapter.loaded.number):
                raise OrderRefused("requests use the adapter")
        if not isinstance(order, c.PrepareRelease):
            return
        if self._scheduler.runnable:
            raise OrderRefused(f"{self._scheduler.live} requests are in flight")
        if self._scheduler.live and not order.preserve:
            raise OrderRefused(f"{self._scheduler.live} requests are frozen and would lose it")

    def _commit(self, change_id: str) -> m.Result:
        order = self._preparation
        self._check_idle(order)
        gone = [
            self._holding.held.adapters[name]
            for name in leaving(order)
            if name in self._holding.held.adapters
        ]
        self._staging.commit(change_id)
        for adapter in gone:
            self._scheduler.drop(adapter.key)
        match order:
            case c.PrepareUpdate(flush=flush):
                switched = tuple(
                    c.SwitchedAt(one.request_id, one.output_length)
                    for one in self._scheduler.sequences()
                    if one.output_length
                )
                freed = 0
                self._scheduler.weights_changed()
                if flush:
                    self._scheduler.recompute()
                    freed = self._scheduler.flush().freed
                return c.ChangeCommitted(switched=switched, blocks_freed=freed)
            case c.PrepareRelease(resources=resources, preserve=False):
                if c.Resource.KV_CACHE in resources:
                    return c.ChangeCommitted(blocks_freed=self._scheduler.flush().freed)
        return c.ChangeCommitted()

    def _take_out(self, sequence: Sequence) -> m.Usage:
        output = self._outputs.pop(sequence.request_id)
        self._scheduler.finish(sequence)
        return m.Usage(
            prompt_tokens=sequence.prompt_length,
            completion_tokens=output.length,
            cached_prompt_tokens=sequence.cached_prompt_tokens or 0,
        )


def _handed_over(chunks: Many[Chunk]) -> tuple[tuple[KvImport, ...], tuple[KvExport, ...]]:
    """What comes into the cache before a step, once, and what goes out after it."""
    imports, exports = [], []
    for chunk in chunks:
        sequence, blocks = chunk.sequence, tuple(chunk.sequence.blocks)
        if sequence.arriving is not None:
            imports.append(KvImport(sequence.arriving, blocks, sequence.adapter))
            sequence.arriving = None
        if chunk.last and sequence.request.export_to:
            request, tokens = sequence.request, sequence.prompt_length
            exports.append(
                KvExport(request.request_id, request.export_to, tokens, blocks, sequence.adapter)
            )
    return tuple(imports), tuple(exports)
