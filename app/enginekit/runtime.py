"""The port that an engine's author implements; the kit does the rest.

Division of work. The kit owns everything an order needs besides the engine itself: validation,
idempotency, revision, epochs, exclusive orders, events, deadlines, and ADMISSION: the gate in front
of `Runtime.generate` that holds or refuses new requests during a pause, applies the hold limit, and
waits for work in flight to end when it drains. A runtime therefore has no queue of held requests
and no idea of revisions; `generate` is called only for requests that are let in.

One gap is the runtime's to close. A request that was let in must be known to the runtime before
`generate` suspends for the first time: from then on a pause may commit at any await, and has to
find the request among those in flight.

Two phases. For each accepted order the kit calls `prepare` on all ranks at once, and when all have
returned, `commit` on all ranks; then `conclude` once. If a `prepare` raises, `rollback` is called
on every rank and the order fails with nothing changed. If a `commit` raises, `rollback` is called
on every rank, and unless all of them return the engine is inconsistent. A `conclude` that raises
counts as a commit that raises. The kit cancels `prepare` when the order is cancelled, another rank
fails or the deadline passes; a `commit` is cancelled by the deadline alone.

Repeats. A pause may come while the engine is paused in another mode (KEEP then ABORT ends what is
frozen); its rollback returns to that earlier pause, not to running. A pause that only changes what
happens to new requests never reaches the ranks.

What is optional. An engine that offers only some operations implements those: every order comes
through the same four methods, and one whose kind `capabilities` does not name never comes.
Profiles, cache events and weights in pieces have ports of their own, `ProfilerRuntime`,
`KvEventRuntime` and `WeightSessionRuntime`; what a runtime does not implement is not advertised.
`SharedRuntime` is for engines that have other callers too, `WatchedRuntime` for those that notice
by themselves when a rank is lost or comes back. Release, reconfiguration and updates rest on pauses
and are not offered without them.

Orders that pause by themselves. A release or reconfiguration of an engine that is open, and an
update with `PauseAround`, send a `Pause` and later a `Resume` of their own, with an
`Order.operation_id` of their own. A release and a reconfiguration are paused before they prepare.
An update is prepared while the engine serves, then the pause is prepared, committed and concluded,
and then the update is committed: a runtime has to keep what it prepared over that pause, and an
update that can't be prepared disturbs no request. The `Resume` comes after the outer order's
`conclude`, or after its `rollback`.

What each order asks of a runtime, beside what `Runtime` says:
  ReleaseResources  only with resources that are held, or are preserved and now to be discarded;
                    nothing runs, though requests may be frozen (then with PRESERVE alone). Give the
                    memory back to the system; conclude with `memory`.
  RestoreResources  only with resources that are released. Preserved content is as it was; of what
                    was discarded, only the room comes back. Conclude with `memory`.
  UpdateWeights     prepare: read, check names, shapes, dtypes, digests and (`check_finite`) values,
                    and put the new weights beside the live ones; never touch those. commit: swap,
                    and with CachePolicy.FLUSH drop all KV that the old weights computed, that of
                    frozen requests included (they are computed again). rollback: the old weights,
                    proved by checksum; raise if that can't be proved. With `Order.replace_all` an
                    update that leaves any parameter as it was must not be prepared. Conclude with
                    `evidence`, `components` and `flushed`.
  ReconfigureServing  nothing runs. `ranks` may change with the return of `conclude`, no earlier;
                    `rollback` is asked of the ranks that were there before. Conclude with `flushed`
                    where the prefix cache does not come along.
  LoadLora, UnloadLora  may come while requests run. Refuse (RuntimeFault, retryable) to unload an
                    adapter that requests use, or wait for them in `prepare`. A load may evict
                    adapters that no request uses. Conclude with `lora` and `evicted`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from app.domain.capabilities import Capabilities
from app.domain.commands import Command, StartProfile
from app.domain.facts import LoraFact, WeightsFact
from app.domain.kinds import (
    AbortOutcome,
    CacheKind,
    Component,
    EngineRole,
    PauseMode,
    ResourceKind,
)
from app.domain.operation import OperationWarning, Progress
from app.domain.ranks import RankReport
from app.domain.weight_sessions import Chunk
from app.rpc.openengine.v1 import generation_pb2, kv_pb2


class RuntimeFault(Exception):
    """A rank could not do its part. `reason` is UPPER_SNAKE; the message is shown to callers.
    `ranks`: which, where it is not one rank that was asked, as for a profile. `code` is the name of
    a google.rpc.Code; None: UNAVAILABLE where it is retryable, else INTERNAL. `applied`, of a
    rollback alone: what the rank had before is gone, though the order never came to its commit."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        retryable: bool = False,
        ranks: tuple[int, ...] = (),
        code: str | None = None,
        applied: bool = False,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retryable = retryable
        self.ranks = ranks
        self.applied = applied
        self.code = code or ("UNAVAILABLE" if retryable else "INTERNAL")


class RequestRefused(Exception):
    """`generate` will not serve this request. `code` is an `openengine.v1.ErrorCode` number."""

    def __init__(self, code: int, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = retryable


class Feature(StrEnum):
    """Parts of a GenerateRequest that an engine need not know. Where the feature is not in the
    description the kit answers UNSUPPORTED_FEATURE; the runtime never sees such a request. Text
    and token ids, temperature, top_p, top_k, seed and StoppingOptions are expected of all."""

    MIN_P = "min_p"
    FREQUENCY_PENALTY = "frequency_penalty"
    PRESENCE_PENALTY = "presence_penalty"
    REPETITION_PENALTY = "repetition_penalty"
    PARALLEL_SEQUENCES = "parallel_sequences"  # num_sequences above 1
    PROMPT_LOGPROBS = "prompt_logprobs"
    OUTPUT_LOGPROBS = "output_logprobs"
    PREFIX_CACHE_BYPASS = "prefix_cache_bypass"
    CACHE_SALT = "cache_salt"
    KV_SESSION = "kv_session"
    GUIDED_DECODING = "guided_decoding"
    MEDIA = "media"
    LORA = "lora"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """Constant for the life of the process, but for what a reconfiguration changes. Sizes in
    tokens, blocks or requests; None: unknown.

    The first of `models` is the default one.
    """

    name: str
    version: str
    models: tuple[str, ...]
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    kv_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_running_requests: int | None = None
    max_batched_tokens: int | None = None
    max_context_length: int | None = None
    max_output_tokens: int | None = None
    max_top_logprobs: int | None = None  # None: no log probabilities
    max_loras: int | None = None  # adapters resident at once
    max_sequences: int = 1  # parallel outputs of one prompt
    features: frozenset[Feature] = frozenset()


@dataclass(frozen=True, slots=True)
class Holding:
    """Whether the engine itself holds requests back. `mode` None: it does not. Where the mode can't
    be read, KEEP: then nothing is taken for finished that may be frozen."""

    mode: PauseMode | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the ranks hold now. `ranks` lists only those that are not well.

    While an order is under way only `ranks` is looked at; the rest is read when `conclude` has
    returned, and has to show what the order did. The kit itself says UPDATING during a commit,
    MISSING after weights were discarded, INCONSISTENT after a rollback that failed, and counts
    `updates_since_flush`; a runtime says VALID, or what is wrong with the weights it has.

    `group` tells ranks that were started together from those before them. Another number says:
    nothing that earlier orders left in the ranks is there any more, and `weights` has been proved
    of the ranks that are there now.

    `holding` is for an engine that others may pause and resume past the kit, or that outlives it:
    the kit then follows what it sees, outside of orders, as a pause or resume by `external`. None:
    nobody can, and the gate alone decides.
    """

    weights: WeightsFact
    released: frozenset[ResourceKind] = frozenset()
    role: EngineRole = EngineRole.AGGREGATED
    loras: tuple[LoraFact, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    group: int = 0
    holding: Holding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    data_parallel_rank: int
    running_requests: int
    queued_requests: int
    used_kv_blocks: int
    total_kv_blocks: int
    prefill_batch_size: int = 0
    decode_batch_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Of one of the world's ranks, as it measured it. `kept_bytes`: copies outside of what it
    serves from, of what is released. `in_use_bytes`: all that the rank takes, its own included."""

    rank: int
    weights_bytes: int
    kv_cache_bytes: int
    kept_bytes: int
    in_use_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The runtime's own numbers; the kit adds the requests that it holds to `queued_requests`."""

    running_requests: int
    queued_requests: int
    used_kv_blocks: int
    total_kv_blocks: int
    running_tokens: int = 0
    waiting_tokens: int = 0
    prefill_batch_size: int = 0
    decode_batch_size: int = 0
    active_kv_sessions: int | None = None  # held for other engines; None: it holds none ever
    ranks: tuple[RankLoad, ...] = ()
    memory: tuple[RankMemory, ...] = ()  # by rank; empty: it is not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An accepted order on its way to the ranks.

    `operation_id` is unique to one way over the ranks: a pause that belongs to another order has
    one of its own. `report` may be called from any phase, on the event loop, as often as one likes:
    only the latest is written, at intervals. `replace_all`: weights are missing or inconsistent, so
    an update counts only if it replaces every parameter. `deadline_at`, on the event loop's clock:
    then the kit interrupts the order; a runtime that gives up a little earlier can say what it
    waited for.
    """

    operation_id: str
    command: Command
    report: Callable[[Progress], None]
    replace_all: bool = False
    deadline_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Flushed:
    """`blocks_in_use`: kept, since work in flight refers to them."""

    kind: CacheKind
    blocks_freed: int
    blocks_in_use: int


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Device memory that one rank held for a resource, measured before and after."""

    rank: int
    resource: ResourceKind
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """What one rank put in place. `sha256`: 32 bytes over its live parameters after the commit."""

    rank: int
    tensors: int
    size_bytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class SwitchedRequest:
    """A request that was frozen while the weights changed: its first `output_tokens` tokens are the
    earlier version's, above 0, and all later ones the new version's."""

    request_id: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ProfileArtifact:
    """One file of a profile. `path` is below the engine's artifact root; `sha256`: 32 bytes."""

    rank: int
    path: str
    size_bytes: int
    sha256: bytes
    media_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What the ranks did together. Only the fields of the order's kind are read.

    For a pause: requests that were aborted or frozen by it (those that a drain let finish are
    counted by the kit). For a resume: requests that continue. For an update: `components` that
    are proved to be new, None for all that were ordered; without `evidence` of every rank it
    counts as unverified; `switched` names the requests whose output is of both versions. For a
    LoRA: the adapter as loaded, or the one that was unloaded, and those that were `evicted` to make
    room for it. `warnings`, of any kind: what a caller has to know though the order succeeded.
    `proved` False, of a flush: not every rank has said that it did it; of an update: whether the
    weights are those that were ordered cannot be told, whatever the evidence says.
    """

    changed: bool = True
    flushed: tuple[Flushed, ...] = ()
    requests_aborted: int = 0
    requests_kept: int = 0
    requests_continued: int = 0
    memory: tuple[RankBytes, ...] = ()
    evidence: tuple[RankEvidence, ...] = ()
    components: frozenset[Component] | None = None
    switched: tuple[SwitchedRequest, ...] = ()
    lora: LoraFact | None = None
    evicted: tuple[LoraFact, ...] = ()
    warnings: tuple[OperationWarning, ...] = ()
    proved: bool = True


@dataclass(frozen=True, slots=True)
class AbortTally:
    """Per id. For all: every id that was in flight."""

    outcomes: Mapping[str, AbortOutcome] = field(default_factory=dict)


class Runtime(Protocol):
    """Coroutines run on the kit's event loop and must not block it."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global rank numbers, ascending."""

    def describe(self) -> EngineDescription: ...

    def capabilities(self) -> Capabilities:
        """What it can carry out. An operation that is not named answers UNIMPLEMENTED. Of
        `cancellable` kinds the preparation may be cancelled.

        The kit itself fills in `limits`, `new_requests`, `drain_rules`, `world_size`, `models`, and
        that a pause can be cancelled. `new_requests` and `drain_rules` that are named here narrow
        what it fills in: requests that do not come through its gate it can neither refuse nor see.
        Releases rest on pauses, but for an engine that closes by itself in one: it names a drain
        rule and no pause.
        """

    async def observe(self) -> Observation:
        """Asked about once a second: cheap, and equal as long as nothing has changed, since each
        difference raises the revision."""

    async def load(self) -> Load: ...

    async def prepare(self, order: Order, rank: int) -> None:
        """Do all that can fail and can be undone. Cancelling the coroutine must leave the rank
        fit for `rollback`. Raises RuntimeFault."""

    async def commit(self, order: Order, rank: int) -> None:
        """Make it take effect. For a pause: stop (ABORT: end all in flight, with the reason said to
        them; KEEP: freeze them; DRAIN: nothing is in flight any more). Raises RuntimeFault."""

    async def rollback(self, order: Order, rank: int) -> None:
        """Back to the state before `prepare`. Also called for a rank that never prepared."""

    async def conclude(self, order: Order) -> Conclusion: ...

    def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """One request, `request_id` and `model` never empty, one input. Closing the iterator, or
        cancelling the task that reads it, aborts the request; it is over when `aclose` returns.

        Raises RequestRefused before the first response; later ends come as an `error` response.
        """

    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> AbortTally:
        """End the named requests, or with None all of them, frozen ones included. Returns when
        each has ended; `message` is what their streams say."""

    async def probe(self) -> None:
        """A minimal generation; raises RuntimeFault when the engine cannot serve."""

    async def close(self) -> None:
        """Called once, last, by `EngineServer.stop`."""


@runtime_checkable
class WatchedRuntime(Protocol):
    """A runtime that says when something may have changed without an order, such as a lost rank.
    From others the kit learns it when it next asks, about a second later."""

    async def moved(self) -> None:
        """Returns once `observe` may answer something else than at the last return. May be
        cancelled at any time; one caller at a time."""


@runtime_checkable
class SharedRuntime(Protocol):
    """A runtime whose engine also takes requests that do not come through the kit's gate. Those of
    its own are none of them. A drain waits for them in `prepare`."""

    async def others(self) -> int:
        """How many of them are in flight. Raises RuntimeFault."""


@runtime_checkable
class ProfilerRuntime(Protocol):
    """A runtime that can profile itself. One profile at a time; beside it all goes on."""

    async def start_profile(self, profile_id: str, command: StartProfile) -> None:
        """Returns when every rank records. RuntimeFault or cancellation: no rank does.

        The kit keeps the time of `duration_ms`, and stops what is stopped.
        """

    async def profiled(self, profile_id: str) -> None:
        """Returns when the `steps` are done, or when recording ended for another reason; never, if
        there is none. May be cancelled at any time."""

    async def finish_profile(self, profile_id: str) -> tuple[ProfileArtifact, ...]:
        """Stop recording on every rank, and write the files. RuntimeFault, or cancellation at the
        deadline: recording has stopped all the same, and nothing half written is left."""

    async def drop_profile(self, profile_id: str) -> None:
        """Stop recording on every rank, and write nothing. For each profile that started, either
        this or `finish_profile` is called, once."""


@runtime_checkable
class WeightSessionRuntime(Protocol):
    """A runtime that takes the weights of one update in pieces, by the ways that its capabilities
    name as `weight_sessions`. The order is an UpdateWeights whose source is a `SessionWeights`.

    Both methods belong to the preparation: they raise RuntimeFault, touch nothing that is live, may
    be cancelled, and a rollback ends the order on every rank, at any time from the first call on.
    `prepare` comes when all pieces are there: check that they are a whole, then go on as with any
    update. The kit keeps keys, order and lease; a piece comes once.
    """

    async def open_session(self, order: Order, rank: int) -> None:
        """First: whatever the pieces need to travel (a process group is joined here)."""

    async def stage_chunk(self, order: Order, rank: int, chunk: Chunk) -> None:
        """Put one piece beside the live weights. Asked of all ranks at once, one piece at a time,
        in the order of their indices."""


@runtime_checkable
class KvSessionRuntime(Protocol):
    """A runtime that hands KV over to other engines, or takes it over (Feature.KV_SESSION)."""

    def kv_connector(self) -> kv_pb2.KvConnectorInfo: ...

    async def abort_kv_session(
        self, session: kv_pb2.KvSessionRef, message: str, *, by_admin: bool
    ) -> AbortOutcome:
        """End a session that is held here, or the request that goes on from it. An administrator
        names it by its id; from anybody else the reference itself has to prove the right to it,
        and a session that it does not prove looks like none. Raises RequestRefused, RuntimeFault.
        """


@runtime_checkable
class KvEventRuntime(Protocol):
    """A runtime that tells of its KV cache, in the core messages. Where events are to be had is
    told on both listeners; the events themselves, which carry tokens of all prompts, on the admin
    listener alone."""

    async def kv_event_sources(
        self, request: kv_pb2.GetKvEventSourcesRequest
    ) -> kv_pb2.GetKvEventSourcesResponse: ...

    def kv_events(
        self, request: kv_pb2.SubscribeKvEventsRequest
    ) -> AsyncIterator[kv_pb2.SubscribeKvEventsResponse]:
        """Closed when the subscriber goes. Raises RequestRefused before the first response; later
        ends come as an `error` response."""
