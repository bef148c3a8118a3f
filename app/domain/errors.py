"""One tree of errors. A leaf has a stable `reason`; edges map the branch to their own codes.

Messages are written for the caller and never repeat input, secrets, host names or gRPC text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldFault:
    """One bad field of a request. `pointer` is an RFC 6901 JSON pointer into the body."""

    pointer: str
    detail: str


class ChadburnError(Exception):
    """Base. `retryable`: the same call may succeed later without being changed."""

    reason: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        operation_id: str | None = None,
        faults: tuple[FieldFault, ...] = (),
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.operation_id = operation_id
        self.faults = faults
        self.retry_after_s = retry_after_s


# ---- branches: an edge knows these, and nothing below them ----


class InvalidArgument(ChadburnError):
    reason = "INVALID_ARGUMENT"


class NotFound(ChadburnError):
    reason = "NOT_FOUND"


class AlreadyExists(ChadburnError):
    reason = "ALREADY_EXISTS"


class Aborted(ChadburnError):
    reason = "ABORTED"


class FailedPrecondition(ChadburnError):
    reason = "FAILED_PRECONDITION"


class ResourceExhausted(ChadburnError):
    reason = "RESOURCE_EXHAUSTED"
    retryable = True


class Unimplemented(ChadburnError):
    reason = "UNIMPLEMENTED"


class Unavailable(ChadburnError):
    reason = "UNAVAILABLE"
    retryable = True


class DeadlineExceeded(ChadburnError):
    reason = "DEADLINE_EXCEEDED"


class EngineFault(ChadburnError):
    """The engine was reached, and what it answered is no use: neither the caller's fault nor
    something that waiting cures."""

    reason = "ENGINE_FAULT"


# ---- leaves ----


class MissingIdempotencyKey(InvalidArgument):
    reason = "IDEMPOTENCY_KEY_MISSING"


class MalformedIdempotencyKey(InvalidArgument):
    reason = "IDEMPOTENCY_KEY_MALFORMED"


class ConflictingRevisions(InvalidArgument):
    """If-Match and expected_revision are both given and differ."""

    reason = "CONFLICTING_REVISIONS"


class UnknownEngine(NotFound):
    reason = "ENGINE_NOT_FOUND"


class UnknownOperation(NotFound):
    reason = "OPERATION_NOT_FOUND"


class UnknownProfile(NotFound):
    reason = "PROFILE_NOT_FOUND"


class UnknownLora(NotFound):
    reason = "LORA_NOT_FOUND"


class UnknownSession(NotFound):
    """No weight session of that name is open, or none of this caller's."""

    reason = "SESSION_NOT_FOUND"


class UnknownArtifact(NotFound):
    """A profile has no file of that rank, or it is no longer where the engine left it."""

    reason = "ARTIFACT_NOT_FOUND"


class LoraExists(AlreadyExists):
    """An adapter of that name is loaded from somewhere else."""

    reason = "LORA_ALREADY_LOADED"


class IdempotencyKeyReused(AlreadyExists):
    reason = "IDEMPOTENCY_KEY_REUSED"


class EngineExists(AlreadyExists):
    reason = "ENGINE_ALREADY_EXISTS"


class EngineAddressTaken(AlreadyExists):
    """Another engine is registered there, so that it may be the same one once more."""

    reason = "ENGINE_ADDRESS_TAKEN"


class RevisionMismatch(Aborted):
    reason = "REVISION_MISMATCH"

    def __init__(self, *, expected: int, current: int, from_header: bool = False) -> None:
        super().__init__(f"expected revision {expected}, the current revision is {current}")
        self.expected = expected
        self.current = current
        self.from_header = from_header


class GenerationMismatch(Aborted):
    """The registration of an engine was changed since the caller read it."""

    reason = "GENERATION_MISMATCH"


class EngineBusy(Aborted):
    """Another exclusive operation is open on the engine; `operation_id` names it."""

    reason = "ENGINE_BUSY"
    retryable = True

    def __init__(
        self,
        message: str = "another operation is running on this engine",
        *,
        operation_id: str | None,
    ) -> None:
        super().__init__(message, operation_id=operation_id, retry_after_s=1)


class EngineFrozen(FailedPrecondition):
    """For a time the engine takes no new orders; the message says until when and why."""

    reason = "ENGINE_FROZEN"
    retryable = True


class StalePauseEpoch(FailedPrecondition):
    reason = "STALE_PAUSE_EPOCH"

    def __init__(self, *, given: int, current: int) -> None:
        super().__init__(f"pause epoch {given} is not the latest, which is {current}")
        self.given = given
        self.current = current


class StaleReleaseEpoch(FailedPrecondition):
    reason = "STALE_RELEASE_EPOCH"

    def __init__(self, *, given: int, current: int) -> None:
        super().__init__(f"release epoch {given} is not the latest, which is {current}")
        self.given = given
        self.current = current


class NotPaused(FailedPrecondition):
    reason = "NOT_PAUSED"


class RequestsFrozen(FailedPrecondition):
    """A drain would wait for ever for requests that a KEEP pause has frozen."""

    reason = "REQUESTS_FROZEN"


class RequestsInFlight(FailedPrecondition):
    """The order was to be refused rather than to touch requests that run."""

    reason = "REQUESTS_IN_FLIGHT"
    retryable = True


class ResourcesReleased(FailedPrecondition):
    """The engine cannot serve while a resource is released."""

    reason = "RESOURCES_RELEASED"


class WeightsNotValid(FailedPrecondition):
    reason = "WEIGHTS_NOT_VALID"


class DrainRunning(FailedPrecondition):
    """Cancel the drain, or abort its requests; a resume does not break it."""

    reason = "DRAIN_RUNNING"


class ProfileRunning(FailedPrecondition):
    """Another profile runs or is being written; `operation_id` names it."""

    reason = "PROFILE_RUNNING"
    retryable = True


class ProfilingRefused(FailedPrecondition):
    """What would be profiled is being released or rebuilt."""

    reason = "PROFILING_REFUSED"
    retryable = True


class ProfileNotRecording(FailedPrecondition):
    """It has been ordered, and the engine has not taken it on yet."""

    reason = "PROFILE_NOT_RECORDING"
    retryable = True


class ProfileNotReady(FailedPrecondition):
    """Its files do not exist: it still records, or it failed."""

    reason = "PROFILE_NOT_READY"


class OperationEnded(FailedPrecondition):
    reason = "OPERATION_ENDED"


class NotCancellable(FailedPrecondition):
    reason = "NOT_CANCELLABLE"


class NotReconciling(FailedPrecondition):
    """Only an outcome that is not known is for a person to state."""

    reason = "NOT_RECONCILING"


class SessionClosed(FailedPrecondition):
    """A weight session that is to be committed, or is being cancelled, takes nothing more."""

    reason = "SESSION_CLOSED"


class ChunkOutOfOrder(FailedPrecondition):
    """Another piece of a weight session is due; none was taken."""

    reason = "CHUNK_OUT_OF_ORDER"

    def __init__(self, *, given: int, expected: int, operation_id: str | None = None) -> None:
        super().__init__(
            f"chunk {given} is out of order: chunk {expected} is due", operation_id=operation_id
        )
        self.given = given
        self.expected = expected


class EngineHasOpenOperation(FailedPrecondition):
    reason = "ENGINE_HAS_OPEN_OPERATION"


class UnsupportedOperation(Unimplemented):
    """The engine does not advertise it."""

    reason = "UNSUPPORTED_OPERATION"


class EngineUnreachable(Unavailable):
    reason = "ENGINE_UNREACHABLE"


class EngineAuthRefused(EngineFault):
    """The engine refused the gateway's own credential, or there is none to show."""

    reason = "ENGINE_AUTH_REFUSED"


class EngineReplyMalformed(EngineFault):
    reason = "ENGINE_REPLY_MALFORMED"


class ArtifactDamaged(EngineFault):
    """A file is not what the engine said of it, or not where it may be."""

    reason = "ARTIFACT_DAMAGED"


class ArtifactsNotReachable(Unimplemented):
    """The gateway has no folder in which to find this engine's files."""

    reason = "ARTIFACTS_NOT_REACHABLE"


class UnsupportedDialect(Unimplemented):
    reason = "UNSUPPORTED_DIALECT"


class TooManyChunks(ResourceExhausted):
    """So many pieces of a weight session wait to be staged that no more are taken for now."""

    reason = "TOO_MANY_CHUNKS"


class QueueFull(ResourceExhausted):
    """As many orders wait for the engine as may; `operation_id` names what they wait for."""

    reason = "QUEUE_FULL"


class TooManyEngineReads(ResourceExhausted):
    """So many callers wait for answers of engines that no more are let wait for now."""

    reason = "TOO_MANY_ENGINE_READS"


class TooManyOpenOperations(ResourceExhausted):
    """So many operations of this engine have not ended that no more are taken on for now."""

    reason = "TOO_MANY_OPEN_OPERATIONS"


class TooManyOperations(ResourceExhausted):
    reason = "TOO_MANY_OPERATIONS"
