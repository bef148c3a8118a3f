"""Everything this engine refuses or loses, one class per reason.

No gRPC codes here: the servicers map these classes once, at the edge.
"""

from __future__ import annotations

from pathlib import Path


class ReferenceEngineError(Exception):
    """Base of all errors the reference engine raises on purpose."""


class CheckpointError(ReferenceEngineError):
    """The checkpoint can not be served; the message names file and cause."""


class CheckpointNotFound(CheckpointError):
    """The path is not a readable directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"no checkpoint directory at {path}")


class CheckpointFileMissing(CheckpointError):
    """A file the Hugging Face layout demands is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"checkpoint file missing: {path}")


class CheckpointFileInvalid(CheckpointError):
    """A file is there and can not be read as what it should be."""

    def __init__(self, path: Path, cause: str) -> None:
        self.path = path
        super().__init__(f"checkpoint file {path} is not valid: {cause}")


class UnsupportedArchitecture(CheckpointError):
    """The configuration asks for something this decoder would compute wrongly."""

    def __init__(self, feature: str, found: object) -> None:
        self.feature = feature
        super().__init__(f"unsupported {feature}: {found!r}")


class TensorMissing(CheckpointError):
    """A tensor the configuration demands is in none of the files."""

    def __init__(self, tensor: str) -> None:
        self.tensor = tensor
        super().__init__(f"checkpoint has no tensor {tensor!r}")


class TensorUnexpected(CheckpointError):
    """A tensor has no place in this configuration: ignoring it would give other results."""

    def __init__(self, tensor: str) -> None:
        self.tensor = tensor
        super().__init__(f"checkpoint has tensor {tensor!r}, which this configuration does not use")


class TensorRepeated(CheckpointError):
    """A tensor was there already: nobody can say which of the two is meant."""

    def __init__(self, tensor: str) -> None:
        self.tensor = tensor
        super().__init__(f"tensor {tensor!r} comes twice")


class TensorMismatch(CheckpointError):
    """A tensor's shape or type is not the one the configuration demands."""

    def __init__(self, tensor: str, expected: str, found: str) -> None:
        self.tensor = tensor
        super().__init__(f"tensor {tensor!r} should be {expected}, found {found}")


class TokenizerMismatch(CheckpointError):
    """The tokenizer knows ids that the model has no embedding for."""

    def __init__(self, tokenizer_size: int, model_size: int) -> None:
        super().__init__(
            f"the tokenizer has {tokenizer_size} tokens, the model only {model_size} embeddings"
        )


class InvalidRequest(ReferenceEngineError):
    """A generation request that can never be served as sent. ``field`` is its wire path."""

    def __init__(self, field: str, cause: str) -> None:
        self.field = field
        self.cause = cause
        super().__init__(f"{field}: {cause}")


class UnsupportedRequest(InvalidRequest):
    """A request that is well formed and asks for something this engine does not offer."""


class DuplicateRequest(ReferenceEngineError):
    """A request with the same id is still open."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request {request_id!r} is still open")


class AdmissionRefused(ReferenceEngineError):
    """The engine takes no new requests now; the same request may be sent again later."""


class Overloaded(ReferenceEngineError):
    """The waiting line is full; the same request may be sent again later."""


class RankLost(ReferenceEngineError):
    """One or more ranks died or stopped answering. What they were doing has an unknown effect."""

    def __init__(self, ranks: tuple[int, ...], cause: str) -> None:
        self.ranks = ranks
        self.cause = cause
        super().__init__(f"rank {', '.join(map(str, ranks))} lost: {cause}")


class PeerLost(ReferenceEngineError):
    """Within a rank: another rank of the group is gone, or can not be reached."""


class StartupFailed(ReferenceEngineError):
    """A rank did not become ready; the message carries its own last words."""


class CannotServe(ReferenceEngineError):
    """Settings, data folder or addresses do not allow to serve; the message is one line."""


class SourceRefused(ReferenceEngineError):
    """New weights may not be read from there, or are not described as they must be."""


class TransferFailed(ReferenceEngineError):
    """New weights that somebody sends did not come. ``rank`` of the engine that noticed first;
    ``tensor`` None: before the first one."""

    def __init__(self, rank: int, tensor: str | None, cause: str) -> None:
        self.rank = rank
        self.tensor = tensor
        self.cause = cause
        at = "" if tensor is None else f", tensor {tensor!r}"
        super().__init__(f"rank {rank}{at}: {cause}")


class AdapterRefused(ReferenceEngineError):
    """An adapter can not be used here; the message names the setting, file or tensor."""


class UnknownAdapter(ReferenceEngineError):
    """A request names an adapter that is not loaded, or that is about to go."""

    def __init__(self) -> None:
        super().__init__("no adapter of that name is loaded")


class OrderRefused(ReferenceEngineError):
    """Within a rank: the order can not be carried out now, and nothing was changed by it."""


class OrderRejected(ReferenceEngineError):
    """A rank answered an order with an error of its own; nothing was changed by it."""

    def __init__(self, rank: int, cause: str) -> None:
        self.rank = rank
        self.cause = cause
        super().__init__(f"rank {rank} rejected the order: {cause}")


class WrongRole(ReferenceEngineError):
    """A request for an engine of another role: prefill and decode each do their own part."""


class KvSessionGone(ReferenceEngineError):
    """There is no such session of KV, or not any more, or its secret is another one."""


class KvTransferFailed(ReferenceEngineError):
    """KV could not be had, or is of no use here. ``again``: the same request may do better."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again
