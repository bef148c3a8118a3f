"""Reconfiguring how an engine serves."""

from __future__ import annotations

from app.conformance.case import Case, Need, NotPromised, case, expect
from app.conformance.client import brief
from app.conformance.orders import named
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb


def _require(trial: Trial, field: pb.ReconfigurableField.ValueType) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_RECONFIGURE_SERVING)
    if field not in trial.profile.reconfigurable:
        name = named(pb.ReconfigurableField, field).removeprefix("RECONFIGURABLE_FIELD_").lower()
        raise NotPromised(f"the profile does not offer to reconfigure {name}")


@case(
    "reconfigure.same",
    "Targets are absolute: reconfiguring to what is there already completes with changed = false.",
    Need.DESTRUCTIVE,
)
async def same(trial: Trial) -> None:
    _require(trial, pb.RECONFIGURABLE_FIELD_ROLE)
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
    _require(trial, pb.RECONFIGURABLE_FIELD_MAX_RUNNING_REQUESTS)
    first = await _set(trial, 2)
    second = await _set(trial, 3)
    for name in ("role", "tensor_parallel_size", "data_parallel_size", "max_batched_tokens"):
        was, now = getattr(first, name), getattr(second, name)
        expect(was == now, f"{name} {was} as before", now)
    await _set(trial, _usual(trial))


def _usual(trial: Trial) -> int:
    """What the engine had is not in its profile; discovery said it before the run."""
    return trial.running_limit or 64


async def _set(trial: Trial, value: int) -> pb.ReconfigureServingResult:
    request = trial.orders.reconfigure(max_running_requests=value)
    result = (await trial.client.completed(request)).reconfigure_serving
    found = result.max_running_requests
    expect(found == value, f"max_running_requests {value}", found)
    return result


CASES: tuple[Case, ...] = (same, limit)
