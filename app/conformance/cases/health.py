"""Health, for each service on its own: liveness is not readiness."""

from __future__ import annotations

from app.conformance.case import Case, Need, NotApplicable, case, expect
from app.conformance.client import Client
from app.conformance.orders import named
from app.conformance.record import Refusal
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import lifecycle_pb2

INFERENCE, ADMIN = "openengine.v1.Inference", "openengine.v1.OpenEngineAdmin"
SERVING, NOT_SERVING = "SERVING", "NOT_SERVING"
_H = lifecycle_pb2.HealthState


async def _is(client: Client, service: str, wanted: str, when: str) -> None:
    found = await client.health(service)
    expect(found == wanted, f'health of "{service}" to be {wanted} {when}', found)


@case(
    "health.liveness",
    'The service "" is SERVING as long as the process can answer, also under a pause.',
)
async def liveness(trial: Trial) -> None:
    await _is(trial.client, "", SERVING, "while admission is open")
    async with trial.paused():
        await _is(trial.client, "", SERVING, "under a pause")


@case(
    "health.readiness",
    "The Inference service is SERVING only while admission is open: under a pause of any mode it is"
    " NOT_SERVING, and after the resume it is SERVING.",
)
async def readiness(trial: Trial) -> None:
    await _is(trial.client, INFERENCE, SERVING, "while admission is open")
    trial.require_pauses()
    for mode in trial.profile.pause_modes:
        async with trial.paused(mode=mode):
            await _is(trial.client, INFERENCE, NOT_SERVING, "under a pause")
        await _is(trial.client, INFERENCE, SERVING, "after the resume")


@case(
    "health.readiness-while-draining",
    "While a drain runs, the Inference service is NOT_SERVING: nobody should send it requests.",
    Need.INFERENCE,
)
async def draining(trial: Trial) -> None:
    async with trial.draining() as (_, _, generation):
        await _is(trial.client, INFERENCE, NOT_SERVING, "while a drain runs")
        generation.hang_up()


@case(
    "health.admin",
    "The OpenEngineAdmin service is SERVING as long as orders can be taken, also under a pause.",
)
async def admin(trial: Trial) -> None:
    await _is(trial.client, ADMIN, SERVING, "while admission is open")
    async with trial.paused():
        await _is(trial.client, ADMIN, SERVING, "under a pause")


@case(
    "health.inference-listener",
    "The inference listener tells the same health of the Inference service as the admin listener.",
    Need.INFERENCE,
)
async def inference_listener(trial: Trial) -> None:
    assert trial.options.inference is not None
    client = Client(trial.options.inference, trial.record, trial.patience_s)
    try:
        await _is(client, "", SERVING, "while admission is open")
        await _is(client, INFERENCE, SERVING, "while admission is open")
        async with trial.paused():
            await _is(client, "", SERVING, "under a pause")
            await _is(client, INFERENCE, NOT_SERVING, "under a pause")
    finally:
        await client.close()


@case(
    "health.core",
    "Core Health is READY while the engine serves and NOT_READY under a pause.",
)
async def core(trial: Trial) -> None:
    ready = await _core(trial)
    expect(ready == _H.HEALTH_STATE_READY, "core Health READY", named(_H, ready))
    async with trial.paused():
        held = await _core(trial)
        expect(held == _H.HEALTH_STATE_NOT_READY, "core Health NOT_READY", named(_H, held))


@case(
    "health.core-while-draining",
    "Core Health is DRAINING while a drain runs.",
    Need.INFERENCE,
)
async def core_draining(trial: Trial) -> None:
    async with trial.draining() as (_, _, generation):
        seen = await _core(trial)
        expect(seen == _H.HEALTH_STATE_DRAINING, "core Health DRAINING", named(_H, seen))
        generation.hang_up()


@case(
    "health.watch",
    "Whoever watches the health of the Inference service is told when a pause takes effect, and"
    " when it is lifted.",
)
async def watch(trial: Trial) -> None:
    trial.require_pauses()
    async with trial.client.watching(INFERENCE) as told:
        await told.until(SERVING, "at the beginning")
        async with trial.paused():
            await told.until(NOT_SERVING, "under a pause")
        await told.until(SERVING, "after the resume")


async def _core(trial: Trial) -> lifecycle_pb2.HealthState.ValueType:
    answer = await trial.client.of_control("Health", lifecycle_pb2.HealthRequest())
    if isinstance(answer, Refusal):
        raise NotApplicable(f"Health on the admin listener is answered with {answer}")
    state: lifecycle_pb2.HealthState.ValueType = answer.state
    return state


CASES: tuple[Case, ...] = (
    liveness,
    readiness,
    draining,
    admin,
    inference_listener,
    core,
    core_draining,
    watch,
)
