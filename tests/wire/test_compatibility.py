"""Our contracts agree with the public ones in every name, number, type and presence.

The tables beside this file were read off the public schemas, not off ours. That agreement is
what lets a client or an engine built against the public files talk to this project.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from app.rpc.openengine.v1 import (
    admin_pb2,
    error_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    openengine_pb2,
    server_pb2,
)
from app.rpc.vllm import control_pb2
from tests.wire.shape import shape, table

CORE = (
    error_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    openengine_pb2,
    server_pb2,
)

ORDER = "AdminOperationEvent"
ADMIN_RPCS = {
    # The eleven that were proposed in public …
    ("FlushCaches", "FlushCachesRequest", "stream", ORDER),
    ("Pause", "PauseRequest", "stream", ORDER),
    ("Resume", "ResumeRequest", "stream", ORDER),
    ("ReleaseResources", "ReleaseResourcesRequest", "stream", ORDER),
    ("RestoreResources", "RestoreResourcesRequest", "stream", ORDER),
    ("UpdateWeights", "UpdateWeightsRequest", "stream", ORDER),
    ("StartProfile", "StartProfileRequest", "", "StartProfileResponse"),
    ("StopProfile", "StopProfileRequest", "", "StopProfileResponse"),
    ("ReconfigureServing", "ReconfigureServingRequest", "stream", ORDER),
    ("GetOperation", "GetAdminOperationRequest", "", "AdminOperation"),
    ("CancelOperation", "CancelAdminOperationRequest", "", "CancelAdminOperationResponse"),
    # … and those this project adds: for discovery and re-attachment, and for a trainer that waits
    # in its process group before it sends anything.
    ("GetAdminProfile", "GetAdminProfileRequest", "", "AdminProfile"),
    ("JoinGroup", "JoinGroupRequest", "", "JoinGroupResponse"),
}


def proto(descriptor: FileDescriptor) -> FileDescriptorProto:
    copy = FileDescriptorProto()
    descriptor.CopyToProto(copy)
    return copy


def core() -> list[FileDescriptorProto]:
    return [proto(module.DESCRIPTOR) for module in CORE]


def test_core_is_the_public_schema() -> None:
    assert shape(core()) == table("openengine_v1.txt")


def test_core_keeps_the_public_split_into_files() -> None:
    names = {file.name for file in core()}
    stems = ["error", "generation", "kv", "lifecycle", "lora", "model", "openengine", "server"]
    assert names == {f"openengine/v1/{stem}.proto" for stem in stems}


def test_vllm_is_the_published_schema() -> None:
    assert shape([proto(control_pb2.DESCRIPTOR)]) == table("vllm.txt")


def test_the_tables_are_whole() -> None:
    """A table that lost its services or its middle would still be equal to a schema that did."""
    counts = {
        name: tuple(
            sum(line.startswith(kind) for line in table(name))
            for kind in ("message ", "enum ", "rpc ")
        )
        for name in ("openengine_v1.txt", "vllm.txt")
    }
    assert counts == {"openengine_v1.txt": (63, 9, 11), "vllm.txt": (46, 1, 21)}


def test_admin_has_the_proposed_signatures() -> None:
    service = admin_pb2.DESCRIPTOR.services_by_name["OpenEngineAdmin"]
    assert service.full_name == "openengine.v1.OpenEngineAdmin"
    assert {
        (m.name, m.input_type.name, "stream" * m.server_streaming, m.output_type.name)
        for m in service.methods
    } == ADMIN_RPCS
    assert not any(m.client_streaming for m in service.methods)


def test_admin_defines_nothing_under_a_public_name() -> None:
    """One package: a name that the public schema takes later would be a clash, one it has is."""
    ours = {line.split()[1] for line in shape([proto(admin_pb2.DESCRIPTOR)]) if "." in line}
    public = {line.split()[1] for line in table("openengine_v1.txt") if line.startswith("message ")}
    assert not ours & public


@pytest.mark.parametrize("enum", admin_pb2.DESCRIPTOR.enum_types_by_name.values())
def test_zero_never_means_anything_in_an_admin_enum(enum: object) -> None:
    values = enum.values_by_number  # type: ignore[attr-defined]
    assert values[0].name.endswith("_UNSPECIFIED")


MUTATIONS: dict[str, Callable[[FileDescriptorProto], None]] = {}


def mutation(change: Callable[[FileDescriptorProto], None]) -> Callable[..., None]:
    MUTATIONS[change.__name__] = change
    return change


def field(file: FileDescriptorProto, message: str, name: str) -> FieldDescriptorProto:
    [found] = [f for m in file.message_type if m.name == message for f in m.field if f.name == name]
    return found


@mutation
def another_number(file: FileDescriptorProto) -> None:
    field(file, "KvSessionRef", "dp_rank").number = 9


@mutation
def wider_type(file: FileDescriptorProto) -> None:
    field(file, "KvSessionRef", "dp_rank").type = FieldDescriptorProto.TYPE_UINT64


@mutation
def another_message(file: FileDescriptorProto) -> None:
    field(file, "KvEvent", "block_removed").type_name = ".openengine.v1.BlockStored"


@mutation
def another_name(file: FileDescriptorProto) -> None:
    field(file, "KvSessionRef", "dp_rank").name = "rank"


@mutation
def presence_lost(file: FileDescriptorProto) -> None:
    [message] = [m for m in file.message_type if m.name == "KvEventSource"]
    one = field(file, "KvEventSource", "max_queue_size")
    one.proto3_optional = False
    one.ClearField("oneof_index")
    del message.oneof_decl[-1]  # the synthetic one of this field


@mutation
def presence_gained(file: FileDescriptorProto) -> None:
    [message] = [m for m in file.message_type if m.name == "KvSessionRef"]
    message.oneof_decl.add(name="_dp_rank")
    one = field(file, "KvSessionRef", "dp_rank")
    one.proto3_optional = True
    one.oneof_index = len(message.oneof_decl) - 1


@mutation
def repeated(file: FileDescriptorProto) -> None:
    field(file, "KvSessionRef", "dp_rank").label = FieldDescriptorProto.LABEL_REPEATED


@mutation
def out_of_its_oneof(file: FileDescriptorProto) -> None:
    field(file, "KvEvent", "block_removed").ClearField("oneof_index")


@mutation
def field_removed(file: FileDescriptorProto) -> None:
    [message] = [m for m in file.message_type if m.name == "KvSessionRef"]
    del message.field[0]


@mutation
def field_added(file: FileDescriptorProto) -> None:
    [message] = [m for m in file.message_type if m.name == "KvSessionRef"]
    message.field.add(
        name="extra",
        number=6,
        type=FieldDescriptorProto.TYPE_STRING,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )


@mutation
def enum_renumbered(file: FileDescriptorProto) -> None:
    file.enum_type[0].value[1].number = 7


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_schema_is_noticed(name: str) -> None:
    file = proto(kv_pb2.DESCRIPTOR)
    MUTATIONS[name](file)
    pool = descriptor_pool.DescriptorPool()
    for dependency in kv_pb2.DESCRIPTOR.dependencies:
        pool.AddSerializedFile(dependency.serialized_pb)
    # protobuf itself accepts the changed schema, so it is a difference that could be shipped.
    changed = proto(pool.AddSerializedFile(file.SerializeToString()))
    rest = [one for one in core() if one.name != file.name]
    assert shape([*rest, changed]) != table("openengine_v1.txt")


@pytest.mark.parametrize("attribute", ["server_streaming", "client_streaming"])
def test_a_changed_stream_is_noticed(attribute: str) -> None:
    file = proto(openengine_pb2.DESCRIPTOR)
    method = file.service[0].method[0]
    setattr(method, attribute, not getattr(method, attribute))
    rest = [one for one in core() if one.name != file.name]
    assert shape([*rest, file]) != table("openengine_v1.txt")
