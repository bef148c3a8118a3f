"""Reconfiguring how an engine serves."""

from __future__ import annotations

from typing import Any

import grpc

from app.conformance.case import Case, Need, NotApplicable, NotPromised, case, expect
from app.conformance.client import brief, completed_of, described, ends_with
from app.conformance.orders import named
from app.conformance.trial import LONG_S, Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import server_pb2

_F = pb.ReconfigurableField
ROLE, RUNNING = _F.RECONFIGURABLE_FIELD_ROLE, _F.RECONFIGURABLE_FIELD_MAX_RUNNING_REQUESTS
BATCHED = _F.RECONFIGURABLE_FIELD_MAX_BATCHED_TOKENS
PARALLEL = _F.RECONFIGURABLE_FIELD_TENSOR_PARALLEL_SIZE
_SHAPE = (
    "role",
    "tensor_parallel_size",
    "data_parallel_size",
    "max_running_requests",
    "max_batched_tokens",
)
_NOBODY_HAS = 1_000_003  # ranks


def _require(trial: Trial, field: pb.ReconfigurableField.ValueType) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_RECONFIGURE_SERVING)
    if field not in trial.profile.reconfigurable:
        name = named(pb.ReconfigurableField, field).removeprefix("RECONFIGURABLE_FIELD_").lower()
        raise NotPromised(f"the profile does not offer to reconfigure {name}")


async def _shape(trial: Trial) -> pb.ReconfigureServingResult:
    """What the engine has now: asked for by a reconfiguration to the role that it has."""
    role = (await trial.client.profile()).state.role
    completed = await trial.client.completed(trial.orders.reconfigure(role=role))
    return completed.reconfigure_serving


async def _set(trial: Trial, **target: Any) -> pb.ReconfigureServingResult:
    """Raises NotHeld unless the result has the targets."""
    result = (await trial.client.completed(trial.orders.reconfigure(**target))).reconfigure_serving
    for name, wanted in target.items():
        found = getattr(result, name)
        expect(found == wanted, f"{name} {wanted}", found)
    return result


def _others_kept(one: Any, other: Any, *but: str) -> None:
    for name in _SHAPE:
        was, now = getattr(one, name), getattr(other, name)
        expect(name in but or was == now, f"{name} {was} as before", now)


@case(
    "reconfigure.same",
    "Targets are absolute: reconfiguring to what is there already completes with changed = false.",
    Need.DESTRUCTIVE,
)
async def same(trial: Trial) -> None:
    _require(trial, ROLE)
    async with trial.unchanged("a reconfiguration to the present role"):
        role = (await trial.client.profile()).state.role
        completed = await trial.client.completed(trial.orders.reconfigure(role=role))
        expect(not completed.changed, "changed = false", brief(completed))
        told = completed.reconfigure_serving.role
        expect(told == role, f"role {role}", told)


@case(
    "reconfigure.limit",
    "A limit takes the value it is given, the other fields keep theirs, and it can be set back.",
    Need.DESTRUCTIVE,
)
async def limit(trial: Trial) -> None:
    _require(trial, RUNNING)
    first = await _set(trial, max_running_requests=2)
    second = await _set(trial, max_running_requests=3)
    _others_kept(first, second, "max_running_requests")
    # What the engine had is not in its profile; discovery said it before the run.
    await _set(trial, max_running_requests=trial.running_limit or 64)


@case(
    "reconfigure.batch",
    "The limit of batched tokens takes the value it is given, the other fields keep theirs, and it"
    " can be set back.",
    Need.DESTRUCTIVE,
)
async def batch(trial: Trial) -> None:
    _require(trial, BATCHED)
    _require(trial, ROLE)
    before = await _shape(trial)
    usual = before.max_batched_tokens
    if not usual:
        raise NotApplicable("the engine does not say how many tokens it batches")
    changed = await _set(trial, max_batched_tokens=usual + 16)
    _others_kept(before, changed, "max_batched_tokens")
    await _set(trial, max_batched_tokens=usual)


@case(
    "reconfigure.role",
    "A role takes effect: the state tells the new one, admission is as before, and it can be set"
    " back.",
    Need.DESTRUCTIVE,
)
async def role(trial: Trial) -> None:
    _require(trial, ROLE)
    usual = (await trial.client.profile()).state.role
    others = sorted(set(server_pb2.EngineRole.values()) - {0, usual})
    for other in others:
        name = named(server_pb2.EngineRole, other)
        told = await trial.client.told(trial.orders.reconfigure(role=other))
        if told.refusal is not None and told.refusal.code is grpc.StatusCode.UNIMPLEMENTED:
            continue
        completed = completed_of(told)
        expect(completed.changed, f"role {name} to be a change", brief(completed))
        state = (await trial.client.profile()).state
        expect(state.role == other, f"role {name} in the state", state.role)
        opened = state.admission == pb.ADMISSION_STATE_OPEN
        expect(opened, "admission OPEN as before", named(pb.AdmissionState, state.admission))
        await _set(trial, role=usual)
        return
    raise NotPromised("the profile offers to reconfigure the role, and the engine has no other")


@case(
    "reconfigure.ranks",
    "Another number of ranks takes effect, with the same weights: the profile tells it, the same"
    " question has the same answer, and it can be set back.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
)
async def ranks(trial: Trial) -> None:
    _require(trial, PARALLEL)
    profile = await trial.client.profile()
    before = await trial.stock.answer()
    usual = trial.tensor_parallel_size
    if not usual:
        raise NotApplicable("discovery does not say how many ranks divide the model")
    other = 2 if usual == 1 else usual // 2
    told = await trial.client.told(trial.orders.reconfigure(tensor_parallel_size=other))
    if not ends_with(told, "completed"):
        raise NotApplicable(f"the engine does not take {other} ranks: {described(told)}")
    after = await trial.client.profile()
    wanted = profile.world_size // usual * other
    expect(after.world_size == wanted, f"world size {wanted}", after.world_size)
    expect(
        after.state.weights == profile.state.weights,
        f"weights {brief(profile.state.weights)} as before",
        brief(after.state.weights),
    )
    trial.know(after)
    await trial.stock.answers_as(before, f"with {other} ranks")
    await _set(trial, tensor_parallel_size=usual)
    await trial.stock.answers_as(before, f"with {usual} ranks again")


@case(
    "reconfigure.impossible",
    "A shape that the engine cannot have is refused or fails, and the old one serves on.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
)
async def impossible(trial: Trial) -> None:
    _require(trial, PARALLEL)
    before = await trial.stock.answer()
    profile = await trial.client.profile()
    request = trial.orders.reconfigure(tensor_parallel_size=_NOBODY_HAS)
    told = await trial.client.told(request)
    failed = told.refusal is not None or ends_with(told, "failed")
    expect(failed, "the reconfiguration to be refused or to fail", described(told))
    after = await trial.client.profile()
    for name, wanted, found in (
        ("world size", profile.world_size, after.world_size),
        ("weights", profile.state.weights, after.state.weights),
        ("admission", profile.state.admission, after.state.admission),
        ("role", profile.state.role, after.state.role),
    ):
        expect(wanted == found, f"{name} {brief(wanted)} as before", brief(found))
    await trial.stock.answers_as(before, "as before the reconfiguration")


@case(
    "reconfigure.joined",
    "While a reconfiguration runs, the same target from somebody else is that operation, and"
    " another target is ABORTED naming it.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
)
async def joined(trial: Trial) -> None:
    """One that waits for a request."""
    _require(trial, RUNNING)
    if pb.DRAIN_RULE_WAIT not in trial.profile.drain_rules:
        raise NotPromised("the profile does not offer drain rule wait")

    def order(limit: int) -> Any:
        return trial.orders.reconfigure(max_running_requests=limit, drain=pb.DRAIN_RULE_WAIT)

    async with trial.traffic.running(LONG_S) as running:
        stream = trial.client.send(order(2))
        first = await stream.first()
        await trial.until_draining(running)
        other = trial.connect()
        late = other.send(order(2))
        found = (await late.first()).operation_id
        expect(found == first.operation_id, f"operation {first.operation_id}", found)
        refusal = await other.refused(order(3), grpc.StatusCode.ABORTED)
        expect(
            first.operation_id in refusal.metadata.values(),
            f"ErrorInfo to name the running operation {first.operation_id}",
            f"{refusal.reason} {refusal.metadata}",
        )
        running.hang_up()
        completed_of(await stream.rest())
        completed_of(await late.rest())
    await _set(trial, max_running_requests=trial.running_limit or 64)


CASES: tuple[Case, ...] = (same, limit, batch, role, ranks, impossible, joined)
