"""Everything that an engine said during a run, for the sentences that hold of all of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from app.rpc.openengine.v1 import admin_pb2

Event = admin_pb2.AdminOperationEvent
TERMINAL = ("completed", "failed", "cancelled")
_OF_THE_TRANSPORT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A gRPC status other than OK. `info` False: it came without google.rpc.ErrorInfo."""

    method: str
    code: grpc.StatusCode
    message: str
    info: bool
    reason: str = ""
    domain: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code.name} {self.reason} ({self.message})"

    @property
    def of_transport(self) -> bool:
        """What a connection says, or a client to itself; an engine says it too, but then with
        ErrorInfo."""
        return self.code in _OF_THE_TRANSPORT and not self.info


def refusal_of(method: str, error: grpc.aio.AioRpcError) -> Refusal:
    """Never raises: details that cannot be read count as absent."""
    info = _error_info(error)
    return Refusal(
        method=method,
        code=error.code(),
        message=error.details() or "",
        info=info is not None,
        reason=info.reason if info else "",
        domain=info.domain if info else "",
        metadata=dict(info.metadata) if info else {},
    )


def _error_info(error: grpc.aio.AioRpcError) -> Any:
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            info = error_details_pb2.ErrorInfo()
            if detail.Is(info.DESCRIPTOR):
                detail.Unpack(info)
                return info
    except Exception:  # a status whose details are no protobuf, or contradict the code
        return None
    return None


@dataclass(slots=True)
class Told:
    """One call of an order. `ended`: the stream came to its end with status OK."""

    method: str
    events: list[Event] = field(default_factory=list)
    ended: bool = False
    refusal: Refusal | None = None
    detached: bool = False

    def __str__(self) -> str:
        kinds = ", ".join(f"{e.sequence} {kind_of(e)}" for e in self.events) or "no event"
        if self.refusal is not None:
            return f"{kinds}, then {self.refusal}" if self.events else str(self.refusal)
        return f"{self.method}: {kinds}"


def kind_of(event: Event) -> str:
    return event.WhichOneof("event") or "an event of no kind"


class Record:
    """`secrets` are values that must never come back; `echoes` says where one did."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = [secret.encode() for secret in secrets]
        self.told: list[Told] = []
        self.refusals: list[Refusal] = []
        self.echoes: list[str] = []
        self.messages = 0

    def heard(self, where: str, message: Message) -> None:
        self.messages += 1
        self._look(where, message.SerializeToString())

    def refused(self, method: str, error: grpc.aio.AioRpcError) -> Refusal:
        refusal = refusal_of(method, error)
        self.refusals.append(refusal)
        self._look(f"status of {method}", (error.details() or "").encode())
        for name, value in error.trailing_metadata() or ():
            raw = value if isinstance(value, bytes) else str(value).encode()
            self._look(f"trailer {name} of {method}", raw)
        return refusal

    def overlook(self) -> None:
        """The last refusal was the transport's own, and no answer of the engine's."""
        self.refusals.pop()

    def _look(self, where: str, raw: bytes) -> None:
        if any(secret in raw for secret in self._secrets):
            self.echoes.append(where)
