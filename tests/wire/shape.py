"""The shape of a protobuf file as lines of text, which a table in this folder can hold.

    message openengine.v1.TokenIds
    openengine.v1.TokenIds 1 ids uint32 repeated
    enum openengine.v1.Modality
    openengine.v1.Modality 0 MODALITY_UNSPECIFIED
    rpc openengine.v1.Inference.Generate openengine.v1.GenerateRequest -> stream …

The last word of a field says how presence works: `plain` (zero and absent are the same),
`optional`, `repeated`, or `oneof:NAME`. Messages are always `optional` or one of those two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MethodDescriptorProto,
)

HERE = Path(__file__).resolve().parent


def table(name: str) -> set[str]:
    """The lines of tests/wire/NAME, comments and blank lines aside."""
    lines = (HERE / name).read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def shape(files: Iterable[FileDescriptorProto]) -> set[str]:
    return {line for file in files for line in _file(file)}


def _file(file: FileDescriptorProto) -> Iterator[str]:
    for message in file.message_type:
        yield from _message(message, file.package)
    for enum in file.enum_type:
        yield from _enum(enum, file.package)
    for service in file.service:
        for method in service.method:
            yield f"rpc {file.package}.{service.name}.{_signature(method)}"


def _message(message: DescriptorProto, scope: str) -> Iterator[str]:
    name = f"{scope}.{message.name}"
    yield f"message {name}"
    for field in message.field:
        yield f"{name} {field.number} {field.name} {_type(field)} {_presence(field, message)}"
    for nested in message.nested_type:
        yield from _message(nested, name)
    for enum in message.enum_type:
        yield from _enum(enum, name)


def _enum(enum: EnumDescriptorProto, scope: str) -> Iterator[str]:
    yield f"enum {scope}.{enum.name}"
    for value in enum.value:
        yield f"{scope}.{enum.name} {value.number} {value.name}"


def _type(field: FieldDescriptorProto) -> str:
    scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return field.type_name.removeprefix(".") or scalar


def _presence(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return "repeated"
    if field.proto3_optional or (
        field.type == FieldDescriptorProto.TYPE_MESSAGE and not field.HasField("oneof_index")
    ):
        return "optional"
    if field.HasField("oneof_index"):
        return f"oneof:{message.oneof_decl[field.oneof_index].name}"
    return "plain"


def _signature(method: MethodDescriptorProto) -> str:
    sent = "stream " * method.client_streaming + method.input_type.removeprefix(".")
    given = "stream " * method.server_streaming + method.output_type.removeprefix(".")
    return f"{method.name} {sent} -> {given}"
