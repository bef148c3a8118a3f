"""Enum values of the wire and of the domain, each way. UNSPECIFIED has no domain value."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, TypeVar

from app.domain.errors import FieldFault, InvalidArgument
from app.domain.kinds import (
    Admission,
    CacheKind,
    CachePolicy,
    CollectiveBackend,
    Component,
    ContentPolicy,
    DrainRule,
    EngineRole,
    FailureEffect,
    NewRequests,
    OperationKind,
    OperationState,
    PauseMode,
    ProfilerKind,
    ProfileState,
    ResourceKind,
    RevisionSource,
    TensorDtype,
    Verification,
    WeightsState,
)
from app.domain.ranks import RankState
from app.rpc.openengine.v1 import admin_pb2, server_pb2

E = TypeVar("E", bound=StrEnum)


class Vocabulary(Generic[E]):
    """One enum. Values correspond by name: `PAUSE_MODE_DRAIN` is `drain`.

    A wire value without a domain one is left out, and then reads as unknown.
    """

    def __init__(self, wire: Any, domain: type[E], prefix: str) -> None:
        values = {value.value: value for value in domain}
        self._of_number: dict[int, E] = {}
        for name, number in wire.items():
            value = values.get(name.removeprefix(f"{prefix}_").lower())
            if value is not None and number != 0:
                self._of_number[number] = value
        self._number_of = {value: number for number, value in self._of_number.items()}

    def read(self, number: int, pointer: str) -> E:
        """Raises InvalidArgument for UNSPECIFIED and for a number that is not in the schema."""
        if number not in self._of_number:
            detail = "must be set" if number == 0 else "is not a value of this enum"
            raise InvalidArgument(
                f"{pointer.removeprefix('/')} {detail}", faults=(FieldFault(pointer, detail),)
            )
        return self._of_number[number]

    def number(self, value: E) -> Any:
        """0 (UNSPECIFIED) where the wire has no such value."""
        return self._number_of.get(value, 0)

    def numbers(self, values: frozenset[E]) -> list[Any]:
        """In the order of the schema."""
        return sorted(self._number_of[value] for value in values if value in self._number_of)


_w = admin_pb2
CACHE_KIND = Vocabulary(_w.CacheKind, CacheKind, "CACHE_KIND")
RESOURCE_KIND = Vocabulary(_w.ResourceKind, ResourceKind, "RESOURCE_KIND")
CONTENT_POLICY = Vocabulary(_w.ContentPolicy, ContentPolicy, "CONTENT_POLICY")
PAUSE_MODE = Vocabulary(_w.PauseMode, PauseMode, "PAUSE_MODE")
DRAIN_RULE = Vocabulary(_w.DrainRule, DrainRule, "DRAIN_RULE")
NEW_REQUESTS = Vocabulary(_w.NewRequests, NewRequests, "NEW_REQUESTS")
CACHE_POLICY = Vocabulary(_w.CachePolicy, CachePolicy, "CACHE_POLICY")
COMPONENT = Vocabulary(_w.Component, Component, "COMPONENT")
PROFILER_KIND = Vocabulary(_w.ProfilerKind, ProfilerKind, "PROFILER_KIND")
PROFILE_STATE = Vocabulary(_w.ProfileState, ProfileState, "PROFILE_STATE")
TENSOR_DTYPE = Vocabulary(_w.TensorDtype, TensorDtype, "TENSOR_DTYPE")
COLLECTIVE_BACKEND = Vocabulary(_w.CollectiveBackend, CollectiveBackend, "COLLECTIVE_BACKEND")
OPERATION_KIND = Vocabulary(_w.AdminOperationKind, OperationKind, "ADMIN_OPERATION_KIND")
OPERATION_STATE = Vocabulary(_w.AdminOperationState, OperationState, "ADMIN_OPERATION_STATE")
RANK_STATE = Vocabulary(_w.RankState, RankState, "RANK_STATE")
VERIFICATION = Vocabulary(_w.Verification, Verification, "VERIFICATION")
FAILURE_EFFECT = Vocabulary(_w.FailureEffect, FailureEffect, "FAILURE_EFFECT")
ADMISSION_STATE = Vocabulary(_w.AdmissionState, Admission, "ADMISSION_STATE")
WEIGHTS_STATE = Vocabulary(_w.WeightsState, WeightsState, "WEIGHTS_STATE")
REVISION_SOURCE = Vocabulary(_w.RevisionSource, RevisionSource, "REVISION_SOURCE")
ENGINE_ROLE = Vocabulary(server_pb2.EngineRole, EngineRole, "ENGINE_ROLE")


def numbers_of_names(wire: Any, prefix: str, names: frozenset[str]) -> list[Any]:
    """For the parts of a profile that the domain knows by name alone. Unknown names are left out
    rather than advertised as something else."""
    known = dict(wire.items())
    spelled = (f"{prefix}_{name.upper()}" for name in names)
    return sorted(known[name] for name in spelled if name in known)
