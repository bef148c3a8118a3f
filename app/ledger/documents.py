"""Domain values as JSON documents in a column, and back.

A value reads back from what an older or newer release wrote: a field that is not in the document
takes its default, and one that is not in the class is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from app.domain.operation import JsonValue
from app.ledger.column_types import storable

T = TypeVar("T")

_MOST_SPELLED = 256
_spelled: dict[int, tuple[object, JsonValue]] = {}
"""By identity; the object is held, so that its number is not given to another one."""


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


def shared_document(value: object) -> JsonValue:
    """The same for what does not change and is shared by many, as the capabilities of engines of
    one make are: spelled once for each object. Not to be changed by whoever gets it."""
    known = _spelled.get(id(value))
    if known is not None and known[0] is value:
        return known[1]
    spelled = document(value)
    if len(_spelled) >= _MOST_SPELLED:
        _spelled.clear()
    _spelled[id(value)] = (value, spelled)
    return spelled


def json_object(value: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """A mapping that is JSON already, without what a database refuses."""
    return cast("dict[str, JsonValue]", document(value))


def read(cls: type[T], stored: Any) -> T:
    """The value of a dataclass from its document."""
    return cast("T", _reader(cast("Any", cls))(stored))


def read_each(cls: type[T], stored: Any) -> tuple[T, ...]:
    return tuple(map(_reader(cast("Any", cls)), stored))


# What a type says of itself is asked once: engines are read many times for each call.
@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return _as_it_is
    if origin in (UnionType, Union):
        (inner,) = (choice for choice in arguments if choice is not NoneType)
        return _reader(inner)
    if origin in (frozenset, tuple):
        return _of_several(origin, _reader(arguments[0]))
    if origin is Mapping:
        return _of_mapping(_reader(arguments[0]), _reader(arguments[1]))
    if is_dataclass(hint):
        return _of_fields(cast("type", hint))
    if hint is datetime:
        return _unless_none(datetime.fromisoformat)
    if issubclass(hint, StrEnum):
        return _unless_none(hint)
    return _as_it_is


def _as_it_is(stored: Any) -> Any:
    return stored


def _unless_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda stored: None if stored is None else read(stored)


def _of_several(kind: Any, each: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return _unless_none(lambda stored: kind(map(each, stored)))


def _of_mapping(key: Callable[[Any], Any], value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return _unless_none(lambda stored: {key(k): value(v) for k, v in stored.items()})


def _of_fields(cls: type) -> Callable[[Any], Any]:
    # What is JSON by its type stays as it is; its recursive alias means nothing elsewhere.
    hints = get_type_hints(cls, localns={"JsonObject": Any, "JsonValue": Any})
    readers = tuple((name, _reader(hint)) for name, hint in hints.items())

    def value(stored: Any) -> Any:
        return cls(**{name: read(stored[name]) for name, read in readers if name in stored})

    return _unless_none(value)
