"""Messages as bytes between processes of one engine: length-prefixed JSON, named types only.

Not pickle: a frame can only ever become one of the frozen values listed here, whoever wrote it.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

from app.reference_engine import (
    adapter_orders,
    cache_changes,
    change_orders,
    handoff_messages,
    messages,
    shape_orders,
    transfer_messages,
)
from app.reference_engine.limits import CoreSettings

HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 64 << 20

_TYPE_KEY = "@"
_OTHERS: tuple[type, ...] = (
    messages.Start,
    messages.EarlierWeights,
    shape_orders.LiveWeights,
    messages.Ping,
    messages.StepPlan,
    messages.StepSpan,
    CoreSettings,
    adapter_orders.AdapterSource,
    adapter_orders.LoadedAdapter,
    change_orders.WeightFile,
    change_orders.DiskSource,
    change_orders.SharedTensor,
    change_orders.SharedSource,
    change_orders.Pieces,
    change_orders.SwitchedAt,
    change_orders.ResourceBytes,
    handoff_messages.PartFile,
    handoff_messages.KvSource,
    handoff_messages.KvImport,
    handoff_messages.KvExport,
    cache_changes.BlockStored,
    cache_changes.BlockRemoved,
    cache_changes.CacheCleared,
    messages.Entry,
    messages.GenerationRequest,
    messages.Sampling,
    messages.Stopping,
    messages.Logprobs,
    messages.OutputToken,
    messages.Candidate,
    messages.Usage,
    messages.StopMatch,
    messages.AbortOf,
)
_TYPES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *get_args(messages.Order),
        *get_args(messages.Result),
        *get_args(messages.Report),
        *get_args(transfer_messages.TransferOrder),
        *get_args(transfer_messages.TransferReport),
        *_OTHERS,
    )
}


class MalformedFrame(Exception):
    """Bytes that no process of this engine would write."""


def encode_frame(batch: Iterable[object]) -> bytes:
    """Several messages as one frame, header included."""
    body = json.dumps(list(batch), separators=(",", ":"), default=_encode).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise MalformedFrame(f"frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Body length in bytes that a header announces."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise MalformedFrame(f"frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return int(length)


def decode_body(body: bytes) -> list[Any]:
    """The messages of one frame."""
    try:
        decoded = json.loads(body, object_hook=_revive)
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedFrame(str(error)) from error
    if not isinstance(decoded, list):
        raise MalformedFrame("a frame is a list of messages")
    return decoded


def _encode(message: Any) -> dict[str, Any]:
    """One message's fields as they are: json comes back for those that are messages themselves.
    What is as it is by default stays away, which is most of what a token's message has."""
    name = type(message).__name__
    fields: dict[str, Any] = {_TYPE_KEY: name}
    for field, usual in _FIELDS[name]:
        value = getattr(message, field)
        if value is not usual:
            fields[field] = value
    return fields


def _revive(fields: dict[str, Any]) -> Any:
    name = fields.pop(_TYPE_KEY)
    for field, convert in _CONVERTERS[name].items():
        if fields.get(field) is not None:
            fields[field] = convert(fields[field])
    return _TYPES[name](**fields)


def _converter(hint: Any) -> Callable[[Any], Any] | None:
    """What JSON loses: tuples come back as lists, enumerations as plain strings."""
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint
    if get_origin(hint) is tuple:
        inside = _converter(get_args(hint)[0])
        return tuple if inside is None else lambda items: tuple(map(inside, items))
    options = get_args(hint)
    if type(None) in options:
        inner = [_converter(option) for option in options if option is not type(None)]
        return inner[0] if len(inner) == 1 else None
    return None


def _converters(cls: type) -> dict[str, Callable[[Any], Any]]:
    hints = get_type_hints(cls)
    found = {name: _converter(hints[name]) for name, _ in _FIELDS[cls.__name__]}
    return {name: convert for name, convert in found.items() if convert is not None}


# With their defaults, or what no field is (MISSING).
_FIELDS: dict[str, tuple[tuple[str, Any], ...]] = {
    name: tuple((field.name, field.default) for field in dataclasses.fields(cls))
    for name, cls in _TYPES.items()
}
_CONVERTERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    name: _converters(cls) for name, cls in _TYPES.items()
}
