"""What a registration must look like before it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.domain.engine import Dialect, Member, TlsNames
from app.domain.errors import FieldFault, InvalidArgument
from app.domain.selectors import is_engine_id, is_label_name, is_label_value

_MOST_LABELS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDraft:
    """What a registration is asked to be."""

    id: str
    dialect: Dialect
    members: tuple[Member, ...]
    tls: TlsNames = field(default_factory=TlsNames)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChange:
    """None: stays as it is."""

    members: tuple[Member, ...] | None = None
    tls: TlsNames | None = None
    labels: Mapping[str, str] | None = None


def check_id(engine_id: str) -> None:
    if not is_engine_id(engine_id):
        raise _fault("/id", "an id has 1 to 63 of a-z, 0-9 and -, and no - at either end")


def check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > _MOST_LABELS:
        raise _fault("/labels", f"an engine has at most {_MOST_LABELS} labels")
    for name, value in labels.items():
        if not is_label_name(name) or not is_label_value(value):
            raise _fault("/labels", "label names and values have at most 63 printable characters")


def _fault(pointer: str, detail: str) -> InvalidArgument:
    return InvalidArgument(detail, faults=(FieldFault(pointer, detail),))
