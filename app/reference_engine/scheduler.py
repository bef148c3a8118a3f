"""Which tokens the next step computes, and who has the KV blocks for it. Pure: no clock, no torch.

Continuous batching: every step takes one token of each sequence that decodes, then prompt chunks
of those that do not yet, within a budget of tokens. When blocks run out, the youngest sequence
gives its blocks back and computes again later what it had; its output so far stays.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from app.reference_engine.cache_changes import BlockStored, CacheChange
from app.reference_engine.errors import OrderRefused
from app.reference_engine.handoff_messages import KvSource
from app.reference_engine.kv_cache import BlockPool, FlushCount, chain_hash, prefix_root
from app.reference_engine.messages import (
    AbortStatus,
    Gate,
    GenerationRequest,
    LoadNumbers,
    SubmitStatus,
)

_REMEMBERED_ENDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """``max_running`` and ``max_waiting`` in requests, the rest in tokens."""

    block_size: int
    max_running: int
    max_waiting: int
    max_batched_tokens: int

    def __post_init__(self) -> None:
        if min(self.block_size, self.max_running, self.max_waiting) < 1:
            raise ValueError("scheduler limits must be positive")
        if self.max_batched_tokens < self.max_running:
            raise ValueError("a step must have room for a token of each running request")


@dataclass(slots=True, eq=False)
class Sequence:
    """One live request. ``tokens`` is prompt and output; the KV of the first ``computed`` is in
    ``blocks``. ``digests`` has the chain hash of every full block that was asked for so far.
    ``arriving`` is the KV of its prompt, until it is taken in. ``adapter`` is the number of the one
    it is computed under (0: none), ``label`` what stands for it in the prefix cache."""

    request: GenerationRequest
    tokens: list[int]
    root: bytes
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    published: int = 0
    generation: int = 0
    cached_prompt_tokens: int | None = None
    arriving: KvSource | None = None
    adapter: int = 0
    label: str = ""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.computed


class Chunk(NamedTuple):
    """``count`` tokens of a sequence from position ``start``. With ``last``, the model's output
    for the final one of them decides the sequence's next token."""

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment] # what a tuple calls count is not used of this one
    last: bool


class Scheduler:
    """Owns the sequences and the block pool. Every method leaves both consistent."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self._limits = limits
        self._pool = pool
        self._running: list[Sequence] = []  # in order of admission, the youngest last
        self._waiting: deque[Sequence] = deque()
        self._awaiting: dict[str, Sequence] = {}  # KV from another engine
        # Findable blocks may be of earlier weights: those that serve on without a flush.
        self._mixed = False
        self._live: dict[str, Sequence] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._gate = Gate.OPEN
        self._preemptions = 0

    @property
    def gate(self) -> Gate:
        return self._gate

    @property
    def live(self) -> int:
        """Requests that have not ended, frozen ones included."""
        return len(self._live)

    @property
    def runnable(self) -> bool:
        """Whether :meth:`plan` would find work."""
        return self._gate is not Gate.FROZEN and bool(self._running or self._waiting)

    def submit(
        self, request: GenerationRequest, *, adapter: int = 0, label: str = ""
    ) -> SubmitStatus:
        """Put a request in line. One that exceeds the model or the pool must not come here."""
        if request.request_id in self._live:
            return SubmitStatus.DUPLICATE
        if len(self._waiting) + len(self._awaiting) >= self._limits.max_waiting:
            return SubmitStatus.OVERLOADED
        sequence = Sequence(
            request=request,
            tokens=list(request.prompt_ids),
            root=prefix_root(request.cache_salt, label),
            adapter=adapter,
            label=label,
        )
        self._ended.pop(request.request_id, None)
        self._live[request.request_id] = sequence
        if request.awaits_kv:
            self._awaiting[request.request_id] = sequence
        else:
            self._waiting.append(sequence)
        return SubmitStatus.ACCEPTED

    def deliver(self, request_id: str, source: KvSource) -> bool:
        """The KV of a prompt has come; False: nobody waits for it any more."""
        sequence = self._awaiting.pop(request_id, None)
        if sequence is None:
            return False
        sequence.arriving = source
        self._waiting.append(sequence)
        return True

    def set_gate(self, gate: Gate) -> Gate:
        """The earlier gate. Ending the live requests before closing is the caller's part."""
        previous, self._gate = self._gate, gate
        return previous

    def set_limits(self, max_running: int, max_batched_tokens: int) -> None:
        """For the steps from now on. Raises OrderRefused, with nothing changed."""
        try:
            self._limits = replace(
                self._limits, max_running=max_running, max_batched_tokens=max_batched_tokens
            )
        except ValueError as error:
            raise OrderRefused(str(error)) from error

    def find(self, request_id: str) -> Sequence | None:
        return self._live.get(request_id)

    def sequences(self) -> tuple[Sequence, ...]:
        """Everything live, in the order in which it came."""
        return tuple(self._live.values())

    def status_of(self, request_id: str) -> AbortStatus:
        """What an abort of that id would meet. Ends are remembered for the latest 10 000 ids."""
        if request_id in self._live:
            return AbortStatus.ABORTED
        known = request_id in self._ended
        return AbortStatus.ALREADY_FINISHED if known else AbortStatus.NOT_FOUND

    def finish(self, sequence: Sequence) -> None:
        """Take a request out, whatever it was doing, and give its blocks back."""
        if self._live.pop(sequence.request_id, None) is not sequence:
            raise ValueError(f"request {sequence.request_id!r} is not live")
        if sequence in self._running:
            self._running.remove(sequence)
        elif self._awaiting.pop(sequence.request_id, None) is None:
            self._waiting.remove(sequence)
        self._give_back(sequence)
        self._ended[sequence.request_id] = None
        while len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)

    def flush(self) -> FlushCount:
        """Empty the prefix cache; see :meth:`BlockPool.flush`."""
        self._mixed = False
        return self._pool.flush()

    def drop(self, label: str) -> FlushCount:
        """Empty the prefix cache of what was computed under one adapter."""
        return self._pool.drop(label)

    def users_of(self, adapter: int) -> int:
        """Live requests that are computed under it, frozen ones included."""
        return sum(1 for one in self._live.values() if one.adapter == adapter)

    def recompute(self) -> None:
        """Every live sequence gives its KV up, and computes it again when it next runs. Its output
        so far stays, and so does its place in the line."""
        self._requeue(self._running)

    def weights_changed(self) -> None:
        """What is handed over must be of one version, though the cache may keep what it has: what
        is on its way in is not taken, and what is to go out is computed anew."""
        self._mixed = True
        self._requeue([one for one in self._running if one.request.export_to])
        self.drop_arrivals()

    def drop_arrivals(self) -> None:
        """What is on its way in is not taken: those prompts are computed here."""
        for sequence in self._waiting:
            sequence.arriving = None

    def _requeue(self, sequences: Iterable[Sequence]) -> None:
        for sequence in reversed(tuple(sequences)):
            self._running.remove(sequence)
            self._give_back(sequence)
            self._waiting.appendleft(sequence)

    def plan(self) -> tuple[Chunk, ...]:
        """The next step's work; empty when there is none. Blocks for it are allocated."""
        if not self.runnable:
            return ()
        budget = self._limits.max_batched_tokens
        chunks: list[Chunk] = []
        for sequence in [one for one in self._running if one.pending == 1]:
            # Room for an older one may have been made by preempting this one; never the reverse,
            # so no sequence that has a chunk already is taken out.
            if budget and sequence in self._running and self._make_room(sequence):
                chunks.append(_chunk(sequence, 1))
                budget -= 1
        for sequence in [one for one in self._running if one.pending > 1]:
            budget = self._take(sequence, budget, chunks)
        while budget and self._waiting and len(self._running) < self._limits.max_running:
            if not self._admit(self._waiting[0]):
                break
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            budget = self._take(sequence, budget, chunks)
        return tuple(chunks)

    def advance(self, chunks: Iterable[Chunk]) -> None:
        """The step was computed: its KV is in the blocks, full blocks become shareable."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            full = sequence.computed // self._limits.block_size
            self._extend_digests(sequence, full)
            for at in range(sequence.published, full):
                block, digest = sequence.blocks[at], sequence.digests[at]
                told = self._stored(sequence, at)
                self._pool.publish(block, digest, sequence.generation, told, label=sequence.label)
            sequence.published = full

    def cache_changes(self) -> tuple[CacheChange, ...]:
        """See :meth:`BlockPool.take_changes`."""
        return self._pool.take_changes()

    def append(self, sequence: Sequence, token_id: int) -> None:
        """The sequence's next token is known."""
        sequence.tokens.append(token_id)

    def load(self) -> LoadNumbers:
        """Batch sizes and steps are filled in by whoever takes the steps."""
        return LoadNumbers(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting) + len(self._awaiting),
            used_kv_blocks=self._pool.used,
            cached_kv_blocks=self._pool.idle,
            total_kv_blocks=self._pool.total,
            running_tokens=sum(len(one.tokens) for one in self._running),
            waiting_tokens=sum(
                len(one.tokens) for one in (*self._waiting, *self._awaiting.values())
            ),
            preemptions=self._preemptions,
        )

    def _take(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Append a chunk within ``budget``; returns what is left of it. Blocks are there already:
        they are allocated for all known tokens on admission."""
        count = min(budget, sequence.pending)
        if count:
            chunks.append(_chunk(sequence, count))
        return budget - count

    def _admit(self, sequence: Sequence) -> bool:
        """Allocate for all known tokens, sharing the longest cached prefix; False: no room yet."""
        size = self._limits.block_size
        shared: list[int] = []
        request = sequence.request
        own = sequence.arriving is not None or (self._mixed and request.export_to)
        if not own and not request.bypass_prefix_cache:
            # At least one token is always computed: its output decides the next one.
            whole = (len(sequence.tokens) - 1) // size
            self._extend_digests(sequence, whole)
            shared = self._pool.match(sequence.digests[:whole])
        # Before the count of what is left: shared blocks that were idle are available no more.
        self._pool.acquire(shared)
        missing = -(-len(sequence.tokens) // size) - len(shared)
        # A block for each running sequence stays free, or growth would preempt this one at once.
        if missing + len(self._running) > self._pool.available:
            self._pool.release(shared)
            return False
        sequence.blocks = shared + self._pool.allocate(missing)
        sequence.computed = len(shared) * size
        if sequence.arriving is not None:
            # All but the last token, whose output decides the next one.
            sequence.computed = sequence.prompt_length - 1
        sequence.published = len(shared)
        sequence.generation = self._pool.generation
        if sequence.cached_prompt_tokens is None:
            sequence.cached_prompt_tokens = sequence.computed
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """A block for the next position, preempting from the youngest; False: it was itself."""
        while len(sequence.blocks) * self._limits.block_size < len(sequence.tokens):
            if self._pool.available:
                sequence.blocks += self._pool.allocate(1)
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._give_back(sequence)
        self._waiting.appendleft(sequence)
        self._preemptions += 1

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.published = 0

    def _stored(self, sequence: Sequence, at: int) -> BlockStored:
        size = self._limits.block_size
        return BlockStored(
            digest=sequence.digests[at].hex(),
            parent=sequence.digests[at - 1].hex() if at else "",
            token_ids=tuple(sequence.tokens[at * size : (at + 1) * size]),
            request_id=sequence.request_id,
            salt=sequence.root.hex() if sequence.request.cache_salt or sequence.adapter else "",
            adapter=sequence.adapter,
            adapter_name=sequence.request.adapter,
        )

    def _extend_digests(self, sequence: Sequence, full_blocks: int) -> None:
        size = self._limits.block_size
        for at in range(len(sequence.digests), full_blocks):
            parent = sequence.digests[at - 1] if at else sequence.root
            tokens = sequence.tokens[at * size : (at + 1) * size]
            sequence.digests.append(chain_hash(parent, tokens))


def _chunk(sequence: Sequence, count: int) -> Chunk:
    start = sequence.computed
    return Chunk(sequence, start, count, start + count == len(sequence.tokens))
