"""What the engine says of itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from app.conformance.case import Case, NotApplicable, case, expect
from app.conformance.orders import name_of
from app.conformance.record import Refusal
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import server_pb2

_DAY_MS = 24 * 60 * 60 * 1000
_K = pb.AdminOperationKind


@case(
    "profile.complete",
    "The profile names the instance, the revision and who keeps it, the limits, the ranks and the"
    " administrative state.",
)
async def complete(trial: Trial) -> None:
    profile = await trial.client.profile()
    expect(bool(profile.instance_id), "an instance id", "none")
    expect(profile.revision > 0, "a revision above 0", profile.revision)
    expect(profile.revision_source != 0, "a revision source", "UNSPECIFIED")
    expect(profile.world_size > 0, "a world size above 0", profile.world_size)
    expect(bool(profile.models), "at least one model", "none")
    state = profile.state
    for name, value in (("admission", state.admission), ("weights", state.weights.state)):
        expect(value != 0, f"the state of {name}", "UNSPECIFIED")
    for limit in ("max_message_bytes", "operations_kept", "default_deadline_ms", "max_deadline_ms"):
        expect(getattr(profile.limits, limit) > 0, f"limit {limit} above 0", 0)


@case("profile.key-retention", "Keys are kept for 24 hours at least.")
async def key_retention(trial: Trial) -> None:
    kept = (await trial.client.profile()).limits.key_retention_ms
    expect(kept >= _DAY_MS, f"key_retention_ms of {_DAY_MS} at least", kept)


@case(
    "profile.consistent",
    "What is offered is named by known values, and every offered operation comes with the choices"
    " that an order of it needs.",
)
async def consistent(trial: Trial) -> None:
    profile = await trial.client.profile()
    kinds = [support.kind for support in profile.operations]
    _known("operations", pb.AdminOperationKind, kinds)
    for name, enum in _CHOICES.items():
        _known(name, enum, getattr(profile, name))
    _known("resources", pb.ResourceKind, [support.kind for support in profile.resources])
    for support in profile.resources:
        _known("content policies", pb.ContentPolicy, support.content)
        expect(bool(support.content), "a content policy for each resource", support)
    for kind, names in _NEEDED.items():
        if kind in kinds:
            for name in names:
                offered = bool(getattr(profile, name))
                expect(offered, f"{name} where {name_of(kind)} is offered", "none")
    for one, other in (
        (_K.ADMIN_OPERATION_KIND_PAUSE, _K.ADMIN_OPERATION_KIND_RESUME),
        (_K.ADMIN_OPERATION_KIND_RELEASE_RESOURCES, _K.ADMIN_OPERATION_KIND_RESTORE_RESOURCES),
    ):
        expect(
            (one in kinds) == (other in kinds),
            f"{name_of(one)} and {name_of(other)} to be offered together",
            [name_of(kind) for kind in kinds],
        )


_CHOICES: dict[str, Any] = {
    "cache_kinds": pb.CacheKind,
    "pause_modes": pb.PauseMode,
    "new_requests": pb.NewRequests,
    "drain_rules": pb.DrainRule,
    "weight_sources": pb.WeightSourceKind,
    "weight_sessions": pb.WeightTransferBackend,
    "cache_policies": pb.CachePolicy,
    "components": pb.Component,
    "profiler_kinds": pb.ProfilerKind,
    "reconfigurable": pb.ReconfigurableField,
}
_NEEDED: dict[Any, tuple[str, ...]] = {
    _K.ADMIN_OPERATION_KIND_FLUSH_CACHES: ("cache_kinds",),
    _K.ADMIN_OPERATION_KIND_PAUSE: ("pause_modes", "new_requests"),
    _K.ADMIN_OPERATION_KIND_RELEASE_RESOURCES: ("resources", "drain_rules"),
    _K.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS: ("weight_sources", "cache_policies", "components"),
    _K.ADMIN_OPERATION_KIND_PROFILE: ("profiler_kinds",),
    _K.ADMIN_OPERATION_KIND_RECONFIGURE_SERVING: ("reconfigurable", "drain_rules"),
}


def _known(name: str, enum: Any, numbers: Iterable[int]) -> None:
    seen = list(numbers)
    known = set(enum.values()) - {0}
    expect(set(seen) <= known, f"{name} to hold values of the schema, not UNSPECIFIED", seen)
    expect(len(set(seen)) == len(seen), f"each of {name} once", seen)


@case("profile.reading-changes-nothing", "Reading the profile changes nothing, however often.")
async def reading(trial: Trial) -> None:
    async with trial.unchanged("reading the profile"):
        for _ in range(5):
            await trial.client.profile()


@case(
    "profile.discovery",
    "Core discovery says that the admin service is present, and names the same instance.",
)
async def discovery(trial: Trial) -> None:
    answer = await trial.client.of_control("GetServerInfo", server_pb2.GetServerInfoRequest())
    if isinstance(answer, Refusal):
        raise NotApplicable(f"GetServerInfo on the admin listener is answered with {answer}")
    told = "openengine_admin" in answer.extra and bool(answer.extra["openengine_admin"])
    expect(told, "extra.openengine_admin to be true", dict(answer.extra))
    expected = (await trial.client.profile()).instance_id
    expect(answer.instance_id == expected, f"instance {expected}", answer.instance_id)


CASES: tuple[Case, ...] = (complete, key_retention, consistent, reading, discovery)
