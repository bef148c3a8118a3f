"""What goes into the ledger and comes out of it. Rows and sessions never do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

from app.domain.engine import HealthState
from app.domain.events import EventType
from app.domain.kinds import EngineRole, OperationKind, OperationState
from app.domain.operation import Actor, JsonObject, Operation, OperationEvent
from app.domain.selectors import EVERYTHING, Sight

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """An idempotency key that an order comes with. Its scope is the operation's actor.

    `fingerprint`: of the whole request. `expires_at` (UTC): the end of the published retention;
    the ledger holds a key for 24 h at least, and never forgets one whose operation is open.
    """

    key: str
    fingerprint: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Accepted:
    """`fresh` False: the key had been used for this very request, and this is what came of it."""

    operation: Operation
    fresh: bool


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """`position`: its place in the order of all events of this ledger, from 1, with gaps. `kind`:
    of its operation."""

    position: int
    event: OperationEvent
    kind: OperationKind


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """`next`: what to pass as `after` or `before` for the following page; None: that was all."""

    items: tuple[T, ...]
    next: int | str | None


# In every filter an empty field lets everything pass, and the fields are and-ed. `sight`: of these
# engines alone.


@dataclass(frozen=True, slots=True)
class Watched:
    """A registered engine, as far as it must be known to see whether it is to be read again.
    `observed_at`: of the reading that is kept, UTC. `busy`: an exclusive order is under way."""

    engine_id: str
    generation: int
    observed_at: datetime | None
    busy: bool


@dataclass(frozen=True, slots=True)
class OpenMark:
    """An operation that has not ended, as far as it must be known to see whether it has gone on.
    `sequence` rises with each of its events."""

    operation_id: str
    engine_id: str
    state: OperationState
    sequence: int

    @property
    def waits(self) -> bool:
        return self.state is OperationState.QUEUED


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFilter:
    """`labels`: all of them, exactly. `version`: the weight version that the engine declares."""

    labels: Mapping[str, str] = field(default_factory=dict)
    states: frozenset[HealthState] = frozenset()
    roles: frozenset[EngineRole] = frozenset()
    version: str | None = None
    sight: Sight = EVERYTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFilter:
    """`since`: created then or later, UTC. `engine_operation_id`: what the engine calls it. `key`:
    the whole idempotency key of the call that ordered it, whoever's that was."""

    engine_id: str | None = None
    engine_operation_id: str | None = None
    key: str | None = None
    kinds: frozenset[OperationKind] = frozenset()
    states: frozenset[OperationState] = frozenset()
    subject: str | None = None
    since: datetime | None = None
    sight: Sight = EVERYTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """`engine_ids` None: of every engine; an empty set: of none (a caller who may see none)."""

    engine_ids: frozenset[str] | None = None
    operation_id: str | None = None
    kinds: frozenset[OperationKind] = frozenset()
    types: frozenset[EventType] = frozenset()
    sight: Sight = EVERYTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """`since`: then or later, UTC. With a limited `sight` no entries that name no engine, or one
    that was never registered."""

    engine_id: str | None = None
    operation_id: str | None = None
    subject: str | None = None
    action: str | None = None
    since: datetime | None = None
    sight: Sight = EVERYTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Who asked for what, from where, and what became of it.

    `action`: what was asked for (`pause`, `cancel`, `register_engine`, …). `outcome`: `accepted`,
    `refused`, or how it ended. `reason`: the code of a refusal or failure. `note`: the caller's
    own words. `source`: the network address of the caller. `at` is UTC. `scopes`: those the call
    takes, whether the caller had them or not.
    """

    at: datetime
    action: str
    outcome: str
    actor: Actor | None = None
    engine_id: str | None = None
    operation_id: str | None = None
    reason: str | None = None
    note: str | None = None
    request_id: str | None = None
    trace_id: str | None = None
    source: str | None = None
    detail: JsonObject = field(default_factory=dict)
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredAudit:
    """`id` rises with each entry; pages go by it."""

    id: int
    entry: AuditEntry


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to drive one engine until `expires_at` (UTC).

    `fence` rises with every new holder of the engine's lease. A write that names an older fence
    changes nothing, so a holder that was asleep cannot undo what its successor has done.
    """

    engine_id: str
    owner: str
    fence: int
    expires_at: datetime
    taken_from: str = field(default="", compare=False)
    """Who had let it run out when this holder took it; empty: it was free."""


@dataclass(frozen=True, slots=True)
class Duty:
    """What one process at a time does for all of them, until `expires_at` (UTC). `fence` as that of
    a lease."""

    name: str
    owner: str
    fence: int
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Says of the audit's rows from `from_id` to `to_id` what they were when it was made.

    `number`: 1, 2, 3 … without a gap. `from_id` follows the `to_id` of the seal before, so that no
    row lies between two seals. `previous`: the digest of that seal. `digest`: SHA-256, hex, over
    all of this but itself, `pruned_at` and `marks`, and over the rows. `fence`: of the duty under
    which it was made. `pruned_at`: its rows are kept no longer; the last such seal stays, as what
    the chain hangs from. `marks`: of each row its id and the beginning of a digest of its own, to
    find which one it is when the digest of all does not agree.
    """

    number: int
    from_id: int
    to_id: int
    row_count: int
    form: int
    previous: str
    digest: str
    sealed_at: datetime
    fence: int
    pruned_at: datetime | None = None
    marks: str = ""
