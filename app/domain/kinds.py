"""Vocabulary of orders and engines. Values are the JSON spelling (lower_snake)."""

from __future__ import annotations

from enum import StrEnum

from app.domain.scopes import Scope


class OperationKind(StrEnum):
    FLUSH_CACHES = "flush_caches"
    PAUSE = "pause"
    RESUME = "resume"
    RELEASE_RESOURCES = "release_resources"
    RESTORE_RESOURCES = "restore_resources"
    UPDATE_WEIGHTS = "update_weights"
    SET_WEIGHT_VERSION = "set_weight_version"
    PROFILE = "profile"
    RECONFIGURE_SERVING = "reconfigure_serving"
    LOAD_LORA = "load_lora"
    UNLOAD_LORA = "unload_lora"
    ABORT_REQUESTS = "abort_requests"
    SHUTDOWN = "shutdown"

    @property
    def exclusive(self) -> bool:
        """Whether at most one such operation may be open on an engine, over all gateways."""
        return self not in _BESIDE_OTHERS

    @property
    def scope(self) -> Scope:
        """The permission that ordering this kind takes."""
        return _SCOPE_OF[self]


_BESIDE_OTHERS = frozenset({OperationKind.ABORT_REQUESTS, OperationKind.PROFILE})

_SCOPE_OF = {
    OperationKind.FLUSH_CACHES: Scope.CACHE,
    OperationKind.PAUSE: Scope.PAUSE,
    OperationKind.RESUME: Scope.PAUSE,
    OperationKind.RELEASE_RESOURCES: Scope.RESOURCES,
    OperationKind.RESTORE_RESOURCES: Scope.RESOURCES,
    OperationKind.UPDATE_WEIGHTS: Scope.WEIGHTS,
    OperationKind.SET_WEIGHT_VERSION: Scope.WEIGHTS,
    OperationKind.PROFILE: Scope.PROFILE,
    OperationKind.RECONFIGURE_SERVING: Scope.RECONFIGURE,
    OperationKind.LOAD_LORA: Scope.ADAPTERS,
    OperationKind.UNLOAD_LORA: Scope.ADAPTERS,
    OperationKind.ABORT_REQUESTS: Scope.ABORT,
    OperationKind.SHUTDOWN: Scope.SHUTDOWN,
}


class OperationState(StrEnum):
    ACCEPTED = "accepted"
    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    RECONCILING = "reconciling"  # sent, and the outcome is not known
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL_STATES


TERMINAL_STATES = frozenset(
    {OperationState.SUCCEEDED, OperationState.FAILED, OperationState.CANCELLED}
)


class Verification(StrEnum):
    VERIFIED = "verified"  # the engine acknowledged it with something that can be read back
    UNVERIFIED = "unverified"
    SETTLED = "settled"  # a person stated the end


class CacheKind(StrEnum):
    PREFIX = "prefix"
    ENCODER = "encoder"
    MULTIMODAL = "multimodal"


class ResourceKind(StrEnum):
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    EXECUTION_GRAPHS = "execution_graphs"


class ContentPolicy(StrEnum):
    PRESERVE = "preserve"
    DISCARD = "discard"


class PauseMode(StrEnum):
    DRAIN = "drain"
    ABORT = "abort"
    KEEP = "keep"


class NewRequests(StrEnum):
    HOLD = "hold"
    REFUSE = "refuse"


class DrainRule(StrEnum):
    """What a release and a reconfiguration do about requests in flight."""

    WAIT = "wait"
    ABORT = "abort"
    REFUSE = "refuse"


class CachePolicy(StrEnum):
    """What an update of weights does with the KV that the earlier weights computed."""

    FLUSH = "flush"
    KEEP = "keep"


class Component(StrEnum):
    TARGET = "target"
    DRAFT = "draft"


class WeightSourceKind(StrEnum):
    DISK = "disk"
    SHARED_MEMORY = "shared_memory"
    INLINE = "inline"
    DISTRIBUTED = "distributed"
    SESSION = "session"


class WeightTransferBackend(StrEnum):
    """How the pieces of a weight session travel."""

    NCCL = "nccl"
    IPC = "ipc"
    DISK = "disk"
    ENGINE_PAYLOAD = "engine_payload"


class CollectiveBackend(StrEnum):
    GLOO = "gloo"
    NCCL = "nccl"


class TensorDtype(StrEnum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def size_bytes(self) -> int:
        """Of one element."""
        return _DTYPE_BYTES.get(self, 1)


_DTYPE_BYTES = {
    TensorDtype.FLOAT64: 8,
    TensorDtype.INT64: 8,
    TensorDtype.FLOAT32: 4,
    TensorDtype.INT32: 4,
    TensorDtype.FLOAT16: 2,
    TensorDtype.BFLOAT16: 2,
    TensorDtype.INT16: 2,
}


class ProfilerKind(StrEnum):
    TORCH = "torch"
    MEMORY = "memory"
    DEVICE = "device"


class ProfileState(StrEnum):
    RUNNING = "running"
    EXPORTING = "exporting"
    READY = "ready"
    FAILED = "failed"


class ReconfigurableField(StrEnum):
    ROLE = "role"
    TENSOR_PARALLEL_SIZE = "tensor_parallel_size"
    DATA_PARALLEL_SIZE = "data_parallel_size"
    MAX_RUNNING_REQUESTS = "max_running_requests"
    MAX_BATCHED_TOKENS = "max_batched_tokens"


class Admission(StrEnum):
    OPEN = "open"
    DRAINING = "draining"
    PAUSED = "paused"
    UNKNOWN = "unknown"


class WeightsState(StrEnum):
    VALID = "valid"
    UPDATING = "updating"
    MISSING = "missing"
    INCONSISTENT = "inconsistent"
    UNKNOWN = "unknown"


class EngineRole(StrEnum):
    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"
    UNKNOWN = "unknown"


class RevisionSource(StrEnum):
    ENGINE = "engine"
    GATEWAY = "gateway"


class FailureEffect(StrEnum):
    """What a failed operation left behind at the engine."""

    NONE = "none"
    ROLLED_BACK = "rolled_back"
    APPLIED_IN_PART = "applied_in_part"
    UNKNOWN = "unknown"


class AbortOutcome(StrEnum):
    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"
    FAILED = "failed"
    UNVERIFIED = "unverified"
