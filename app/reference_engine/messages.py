"""What the front end and the ranks say to each other. Frozen values, no torch, no protobuf.

Orders travel in one numbered log, so that every rank sees the same orders in the same sequence;
each order is acknowledged per rank under its number. Reports flow back unnumbered, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.reference_engine.cache_changes import CacheChanged
from app.reference_engine.change_orders import ChangeOrder, ChangeResult, DiskSource
from app.reference_engine.handoff_messages import (
    CollectKv,
    DeliverKv,
    KvDelivered,
    KvExport,
    KvImport,
    KvWritten,
    PartFile,
)
from app.reference_engine.limits import CoreSettings
from app.reference_engine.recording_orders import Recorded, RecordingOrder
from app.reference_engine.shape_orders import LiveWeights, ShapeOrder, WeightsWritten


class Gate(StrEnum):
    """What the scheduler does with requests. ``FROZEN`` keeps them with their KV blocks."""

    OPEN = "open"
    FROZEN = "frozen"
    CLOSED = "closed"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class StopKind(StrEnum):
    """What a request stopped at: a caller's token, a caller's text, or the model's own end."""

    TOKEN = "token"  # noqa: S105 (a kind of stop, not a secret)
    TEXT = "text"
    EOS = "eos"


class AbortStatus(StrEnum):
    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierWeights:
    """``sha256`` of the rank's own part; empty: there were none. ``source`` None: from the
    checkpoint's own files."""

    source: DiskSource | None
    sha256: str


FirstWeights = EarlierWeights | LiveWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a rank, before the log begins. ``checkpoint`` is a folder's path;
    ``rendezvous`` a file's, through which several ranks find each other.

    ``weights`` None: those of the checkpoint, which must be there. Otherwise what an earlier group
    served. Live ones must be there too; where others no longer are, or are not what they were, the
    rank comes up without any.
    """

    rank: int
    checkpoint: str
    rendezvous: str
    settings: CoreSettings
    weights: FirstWeights | None = None


# ---- a request ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch a filter off.

    ``seed`` is always set: a caller without one was given one when the request came in.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Counts in tokens. Stop texts and tokens count only once ``min_tokens`` are out."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural logarithms under the model itself, before temperature, penalties and filters."""

    top_n: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request checked against the model's limits. ``cache_salt`` separates prefix caches.
    ``adapter`` by its name; empty: the weights alone.

    With ``export_to``, a file for each rank, the prompt alone is computed and its KV written there;
    the request ends with Prefilled. With ``awaits_kv`` it is not computed before DeliverKv.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    logprobs: Logprobs | None = None
    bypass_prefix_cache: bool = False
    cache_salt: str = ""
    export_to: tuple[PartFile, ...] = ()
    awaits_kv: bool = False
    adapter: str = ""


# ---- orders ----


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """``request_ids`` None: every request there is."""

    request_ids: tuple[str, ...] | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGate:
    """``CLOSED`` ends every live request with ``message``, and those that still arrive.

    With ``only_if_idle`` it is refused instead while a request is live.
    """

    gate: Gate
    message: str = ""
    only_if_idle: bool = False


@dataclass(frozen=True, slots=True)
class FlushPrefixCache:
    pass


@dataclass(frozen=True, slots=True)
class ReadLoad:
    pass


@dataclass(frozen=True, slots=True)
class Probe:
    """One forward pass beside all requests; proves that rank and weights can compute."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


Order = (
    Submit
    | Abort
    | SetGate
    | FlushPrefixCache
    | ReadLoad
    | Probe
    | Shutdown
    | DeliverKv
    | CollectKv
    | ChangeOrder
    | RecordingOrder
    | ShapeOrder
)


@dataclass(frozen=True, slots=True)
class StepSpan:
    """The new tokens of one sequence in a step, the blocks that hold its KV, and the number of the
    adapter under which they are computed; 0: none."""

    start: int
    count: int
    blocks: tuple[int, ...]
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the first rank is about to compute; it stands in the log between the entries, and has
    no number: the other ranks only ever compute along. KV comes in before, and goes out after."""

    token_ids: tuple[int, ...]
    spans: tuple[StepSpan, ...]
    imports: tuple[KvImport, ...] = ()
    exports: tuple[KvExport, ...] = ()


@dataclass(frozen=True, slots=True)
class Ping:
    """Beside the log, from the front end to each rank: are you there, and what are you at?"""

    number: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the order log; ``index`` counts 1, 2, 3 … without a gap."""

    index: int
    order: Order


# ---- results of orders ----


class SubmitStatus(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    OVERLOADED = "overloaded"
    UNKNOWN_ADAPTER = "unknown_adapter"


@dataclass(frozen=True, slots=True)
class Submitted:
    status: SubmitStatus
    message: str = ""


@dataclass(frozen=True, slots=True)
class AbortOf:
    request_id: str
    status: AbortStatus


@dataclass(frozen=True, slots=True)
class Aborted:
    """Outcome per id; for all, every id that was live."""

    outcomes: tuple[AbortOf, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSet:
    """Counts of requests that were ended, are frozen, or go on because of the order."""

    previous: Gate
    aborted: int = 0
    kept: int = 0
    continued: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFlushed:
    blocks_freed: int
    blocks_in_use: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank. ``weights`` and ``kv_cache``: what the live tensors measure. ``kept``:
    copies in host memory of what is released. ``in_use``: of the whole process, or what the
    device's allocator has reserved for it."""

    weights: int
    kv_cache: int
    kept: int
    in_use: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadNumbers:
    """Requests, blocks and tokens now; batch sizes in sequences, of the last step taken."""

    running_requests: int = 0
    waiting_requests: int = 0
    used_kv_blocks: int = 0
    cached_kv_blocks: int = 0
    total_kv_blocks: int = 0
    running_tokens: int = 0
    waiting_tokens: int = 0
    prefill_batch_size: int = 0
    decode_batch_size: int = 0
    preemptions: int = 0
    steps: int = 0
    memory: RankMemory | None = None


@dataclass(frozen=True, slots=True)
class Done:
    pass


Result = (
    Submitted
    | Aborted
    | GateSet
    | PrefixFlushed
    | LoadNumbers
    | RankMemory
    | Done
    | KvDelivered
    | KvWritten
    | ChangeResult
    | Recorded
    | WeightsWritten
)


# ---- reports ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Exactly one of ``result`` and ``error``. With an error the order changed nothing."""

    index: int
    rank: int
    result: Result | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A rank can take orders. ``parameters`` and the checksum are of this rank's part; without
    weights, 0 and empty. ``device``: cpu or cuda."""

    rank: int
    pid: int
    total_kv_blocks: int
    max_model_len: int
    parameters: int
    weights_sha256: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    rank: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """``step_age_s``: how long the step that is being computed has taken so far, None between
    steps. ``waits``: for another rank, not for its own computation."""

    number: int
    rank: int
    step_age_s: float | None
    waits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The rank's last word: it can not go on. ``by_peer``: because it can not reach another."""

    rank: int
    message: str
    by_peer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """``place`` counts from 1, the likeliest token of the vocabulary."""

    token_id: int
    text: str
    logprob: float
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    token_id: int
    text: str
    logprob: float | None = None
    place: int | None = None
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens and new text, neither cumulative. Text can lag behind: a character may need
    several tokens, and text that may turn out to be a stop text is held back."""

    request_id: str
    tokens: tuple[OutputToken, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """``completion_tokens`` counts all sampled tokens, a suppressed stop token included."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class StopMatch:
    """``token_id`` for TOKEN and EOS, ``text`` for TEXT."""

    kind: StopKind
    token_id: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    request_id: str
    reason: FinishReason
    usage: Usage
    message: str = ""
    stop: StopMatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The engine could not go on with a request it had accepted."""

    request_id: str
    message: str
    retryable: bool
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """The prompt is computed, and each rank has written its part of the KV, or can not: what became
    of it is collected."""

    request_id: str
    usage: Usage


RequestReport = Tokens | Finished | Failed | Prefilled
Report = Ack | Ready | StartFailed | Pong | Broken | CacheChanged | RequestReport
