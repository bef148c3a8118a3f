"""Domain values as JSON documents in a column, and back.

A value reads back from what an older or newer release wrote: a field that is not in the document
takes its default, and one that is not in the class is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from app.domain.operation import JsonValue
from app.ledger.column_types import storable

T = TypeVar("T")


def document(value: object) -> JsonValue:
    """Enums by value, times as ISO 8601 in UTC, sets sorted, dataclasses by field."""
    match value:
        case StrEnum():
            return value.value
        case str():
            return storable(value)
        case float():
            # JSON has no such numbers, and PostgreSQL takes none.
            return value if math.isfinite(value) else None
        case None | bool() | int():
            return value
        case datetime():
            return value.astimezone(UTC).isoformat()
        case Mapping():
            return {storable(str(key)): document(item) for key, item in value.items()}
        case frozenset() | set():
            return [document(item) for item in sorted(value)]
        case tuple() | list():
            return [document(item) for item in value]
    if is_dataclass(value):
        return {field.name: document(getattr(value, field.name)) for field in fields(value)}
    raise TypeError(f"no JSON form for {type(value).__name__}")


def json_object(value: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """A mapping that is JSON already, without what a database refuses."""
    return cast("dict[str, JsonValue]", document(value))


def read(cls: type[T], stored: Any) -> T:
    """The value of a dataclass from its document."""
    return cast("T", _read(cls, stored))


def read_each(cls: type[T], stored: Any) -> tuple[T, ...]:
    return tuple(read(cls, item) for item in stored)


def _read(hint: Any, stored: Any) -> Any:
    if hint is Any or stored is None:
        return stored
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        (inner,) = (choice for choice in arguments if choice is not NoneType)
        return _read(inner, stored)
    if origin is frozenset:
        return frozenset(_read(arguments[0], item) for item in stored)
    if origin is tuple:
        return tuple(_read(arguments[0], item) for item in stored)
    if origin is Mapping:
        return {_read(arguments[0], k): _read(arguments[1], v) for k, v in stored.items()}
    if is_dataclass(hint):
        hints = _hints(cast("type", hint))
        present = {
            name: _read(kind, stored[name]) for name, kind in hints.items() if name in stored
        }
        return cast("Any", hint)(**present)
    if hint is datetime:
        return datetime.fromisoformat(stored)
    if issubclass(hint, StrEnum):
        return hint(stored)
    return stored


@cache
def _hints(cls: type) -> dict[str, Any]:
    # What is JSON by its type stays as it is; its recursive alias means nothing elsewhere.
    return get_type_hints(cls, localns={"JsonObject": Any, "JsonValue": Any})
