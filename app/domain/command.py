"""What all orders have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

from app.domain.capabilities import Capabilities
from app.domain.errors import (
    FieldFault,
    InvalidArgument,
    RequestsFrozen,
    ResourcesReleased,
    UnsupportedOperation,
)
from app.domain.facts import EngineFacts
from app.domain.kinds import Admission, OperationKind, ResourceKind
from app.domain.operation import JsonObject


def fault(pointer: str, detail: str) -> InvalidArgument:
    return InvalidArgument(detail, faults=(FieldFault(pointer, detail),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`model` None: the whole engine."""

    kind: ClassVar[OperationKind]
    model: str | None = None

    def document(self) -> JsonObject:
        """The order as the ledger keeps it; `command_of` reads it back."""
        return {} if self.model is None else {"model": self.model}

    @property
    def payload(self) -> bytes | None:
        """What goes with the order and is no part of its document. None: nothing does."""
        return None

    def carrying(self, payload: bytes) -> Self:
        """The same order, read back from its document, with what went with it. ValueError: that is
        not what went with it."""
        raise ValueError(f"{self.kind.value} carries nothing, and not {len(payload)} bytes")

    @property
    def lacks_payload(self) -> bool:
        """Whether it was read back from its document and can't be sent so."""
        return False

    def check_supported(self, can: Capabilities) -> None:
        """Raises UnsupportedOperation, or InvalidArgument for a model that is not there."""
        if self.kind not in can.operations:
            raise UnsupportedOperation(f"this engine does not offer {self.kind.value}")
        if self.model is not None and self.model not in can.models:
            raise fault("/model", "this engine does not serve that model")

    def check_state(self, facts: EngineFacts) -> None:
        """Raises FailedPrecondition when the acknowledged state forbids the order."""

    def _require(self, wanted: str, offered: bool) -> None:
        if not offered:
            raise UnsupportedOperation(
                f"this engine does not offer {self.kind.value} with {wanted}"
            )


def frozen_requests(facts: EngineFacts) -> int:
    """Requests that a KEEP pause has frozen."""
    held = facts.pause if facts.admission is Admission.PAUSED else None
    return 0 if held is None else held.requests_kept


def refuse_frozen(facts: EngineFacts) -> None:
    """For orders that can't be carried out around frozen requests. Raises RequestsFrozen."""
    frozen = frozen_requests(facts)
    if frozen:
        raise RequestsFrozen(
            f"{frozen} requests are frozen and cannot finish: resume, or pause with abort"
        )


def refuse_released(released: Iterable[ResourceKind]) -> None:
    """Raises ResourcesReleased, naming them."""
    names = ", ".join(sorted(kind.value for kind in released))
    if names:
        raise ResourcesReleased(f"restore what is released first: {names}")
