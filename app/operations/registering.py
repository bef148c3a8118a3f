"""What a registration must look like before it is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.domain.engine import Dialect, Member, TlsNames
from app.domain.errors import FieldFault, InvalidArgument

_SLUG = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"[\x20-\x7e]{0,63}")
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
    if not _SLUG.fullmatch(engine_id):
        raise _fault("/id", "an id has 1 to 63 of a-z, 0-9 and -, and no - at either end")


def check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > _MOST_LABELS:
        raise _fault("/labels", f"an engine has at most {_MOST_LABELS} labels")
    for name, value in labels.items():
        if not _LABEL.fullmatch(name) or not _VALUE.fullmatch(value):
            raise _fault("/labels", "label names and values have at most 63 printable characters")


def _fault(pointer: str, detail: str) -> InvalidArgument:
    return InvalidArgument(detail, faults=(FieldFault(pointer, detail),))
