"""The port to an engine: what an engine says becomes domain facts here."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol, runtime_checkable

from app.domain.capabilities import Capabilities
from app.domain.commands import Command
from app.domain.facts import EngineFacts
from app.domain.operation import JsonObject, OperationError
from app.domain.transitions import Cancelled, Completed, Fact, Failed
from app.domain.weight_sessions import NcclTransfer, SessionStage


class EngineRefused(Exception):
    """The engine answered before acceptance, or the order could not be sent at all: nothing was
    taken on by this attempt. Of an earlier attempt under the same key it says nothing."""

    def __init__(self, error: OperationError) -> None:
        super().__init__(error.reason)
        self.error = error


class OutcomeLost(Exception):
    """The order may have reached the engine, and the reply that would tell is missing.

    Never a failure: the caller must ask the engine (`find`) before it says or does anything else.
    `why` is for people, and safe to show.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class NotSent(Exception):
    """The moment by which the order was to be sent was over before it could be. This attempt has
    sent nothing; of an earlier one it says nothing."""


class StillRunning(Exception):
    """What is asked about can't be told yet: the engine is seen to be at it."""


class Silence(StrEnum):
    """Why a read has no usable answer."""

    UNREACHABLE = "UNREACHABLE"
    DEADLINE = "DEADLINE"
    AUTH_REFUSED = "AUTH_REFUSED"  # the engine refused OUR credential, or there is none to show
    MALFORMED = "MALFORMED"
    REFUSED = "REFUSED"


class EngineSilent(Exception):
    """A read got no usable answer."""

    def __init__(self, reason: Silence) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Discovery:
    """One reading of an engine: what it is, what it can do, and its administrative state.

    `facts.pause.by` is the idempotency key of the pause as the engine has it (it may belong to
    anyone), empty when it has none. `troubles`: lower_snake words for what is not well although
    it answers: `control_unreachable`, `ranks_unwell`, `ranks_failed` beside it where one has ended
    or is out of reach, `weights_inconsistent`, `members_differ`, `serving_without_weights`; of one
    without an admin service `not_ready` and `degraded`.
    """

    info: JsonObject
    models: tuple[JsonObject, ...]
    capabilities: Capabilities
    facts: EngineFacts
    troubles: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Who answers does so for an engine that does not: its facts are of before."""
        return "ranks_failed" in self.troubles


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`operation_id` is the idempotency key at the engine.

    `deadline_at` (UTC) bounds the whole. `deadline_ms` is what the engine is told; it is the same
    in every attempt, since the same key must come with the same payload. `send_by` (UTC): from
    then on it may not be sent, since others may decide that it never was; None: the engine has
    it, and this attaches.
    """

    operation_id: str
    command: Command
    expected_revision: int | None
    deadline_at: datetime
    deadline_ms: int
    send_by: datetime | None = None
    trace_id: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The engine knows the operation. `instance_id`: the engine process that accepted it.

    `end`: how it ended; carrying it out again replays its events up to this one. None: it has
    not, or its record does not say how.
    """

    engine_operation_id: str
    instance_id: str
    ended: bool = False
    end: Completed | Failed | Cancelled | None = None


class EngineBackend(Protocol):
    """One engine. Every call has a deadline of its own; none of them waits for ever."""

    async def discover(self, timeout_s: float) -> Discovery:
        """Raises EngineSilent."""

    async def load(self, timeout_s: float) -> JsonObject:
        """`running_requests queued_requests used_kv_blocks total_kv_blocks …`; EngineSilent."""

    async def kv_event_sources(self, timeout_s: float) -> tuple[JsonObject, ...] | None:
        """Where cache events can be subscribed to. None: it offers none. Raises EngineSilent."""

    def carry_out(self, order: Order) -> AsyncGenerator[Fact, None]:
        """Send the order, or attach again to it: the same operation id replays from its first
        event. Facts bear `engine_sequence` where the engine counts; the last one is Completed,
        Failed or Cancelled, and the generator then ends.

        Raises EngineRefused (nothing taken on), NotSent, or OutcomeLost (must be asked). Closing
        the generator detaches; it never undoes anything.
        """

    async def go_on(
        self, stage: SessionStage, key: str, expected_revision: int | None, timeout_s: float
    ) -> None:
        """Send a further call of an order that is being carried out, or send it again: the same
        key is taken on once. Returns when the engine has taken it on; what follows comes through
        `carry_out`. Raises EngineRefused, EngineSilent."""

    def end_without_record(self, order: Order) -> Fact | None:
        """For an order of a kind that the engine keeps no record of, so that `find` could not
        answer and sending it again could repeat it: how it ends when its reply is lost. None:
        the engine keeps a record, ask it."""

    async def read_back(
        self, order: Order, sent_to: str | None, timeout_s: float
    ) -> Completed | None:
        """For an order of a kind that the engine keeps no record of, and that shows in its state:
        how it ended. `sent_to`: the engine process that the order was sent to. None: that
        process shows no effect of it, or there is a record to ask for, or it is another process.

        Raises EngineSilent, StillRunning.
        """

    async def find(self, operation_id: str, timeout_s: float) -> Found | None:
        """None: the engine itself answered that it does not know it. Raises EngineSilent."""

    async def cancel(self, engine_operation_id: str, timeout_s: float) -> None:
        """Ask. The end comes through `carry_out`. Raises EngineRefused or EngineSilent."""

    async def stop_profile(self, engine_operation_id: str, key: str, timeout_s: float) -> None:
        """Record no more, and write the files; the end comes through `carry_out`. `key`: of the
        call at the engine. Stopping what has stopped is no error. Raises EngineRefused,
        EngineSilent."""

    async def close(self) -> None: ...


@runtime_checkable
class JoinsGroups(Protocol):
    """An engine that may join a trainer's process group by a call of its own, and then stays in it
    over several updates. Others join with the update that names the group."""

    async def join_group(self, transfer: NcclTransfer, timeout_s: float) -> bool:
        """Returns when it is in. An update by that very group then does not open it again. False:
        it is one of the others. Raises EngineRefused (an order is under way, too); EngineSilent:
        whether it is in is not known, and it counts as out."""
