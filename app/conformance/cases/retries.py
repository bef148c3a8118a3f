"""The same order again: by key it is the same operation, carried out once."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from app.conformance.case import Case, Need, NotPromised, case, expect
from app.conformance.client import completed_of
from app.conformance.record import Told
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

_AT_ONCE = 8
ALREADY_EXISTS = grpc.StatusCode.ALREADY_EXISTS


def same_events(one: Told, other: Told) -> bool:
    return [e.SerializeToString(deterministic=True) for e in one.events] == [
        e.SerializeToString(deterministic=True) for e in other.events
    ]


@case(
    "retry.same-payload",
    "The same key with the same payload is the same operation: its events are told again, and"
    " nothing is done twice.",
)
async def same_payload(trial: Trial) -> None:
    request = trial.order()
    first = await trial.client.told(request)
    completed_of(first)
    async with trial.unchanged("a retry"):
        again = await trial.client.told(request)
    expect(bool(again.events), "the retry to be answered with the operation's events", again)
    expect(
        again.events[0].operation_id == first.events[0].operation_id,
        f"operation {first.events[0].operation_id} again",
        again.events[0].operation_id,
    )


@case(
    "retry.after-the-effect-is-gone",
    "A retry is answered from memory: after the pause has been lifted, the order that made it does"
    " not pause again.",
)
async def effect_gone(trial: Trial) -> None:
    request = trial.pause()
    first = await trial.client.told(request)
    completed_of(first)
    await trial.resumed()
    async with trial.unchanged("a retry of a pause that was lifted"):
        again = await trial.client.told(request)
    expect(same_events(first, again), f"the events as before: {first}", again)


def _others(trial: Trial, key: str) -> list[Any]:
    """Orders under that key which all differ from `trial.order()`."""
    differing: list[Any] = []
    if trial.offers(pb.ADMIN_OPERATION_KIND_PAUSE) and trial.profile.pause_modes:
        differing += [
            trial.orders.pause(mode, idempotency_key=key) for mode in trial.profile.pause_modes[1:]
        ]
        differing.append(trial.order(idempotency_key=key, deadline_ms=59_000))
    if trial.offers(pb.ADMIN_OPERATION_KIND_FLUSH_CACHES):
        differing.append(trial.flush(idempotency_key=key, deadline_ms=58_000))
    return differing


@case(
    "retry.other-payload",
    "The same key with another payload, or on another RPC, is ALREADY_EXISTS, and nothing is done.",
)
async def other_payload(trial: Trial) -> None:
    key = trial.key()
    await trial.client.completed(trial.order(idempotency_key=key))
    for request in _others(trial, key):
        async with trial.unchanged("a key used for something else"):
            await trial.client.refused(request, ALREADY_EXISTS)


@case(
    "retry.parallel",
    "Any number of calls with one key at the same time are one operation, carried out once.",
)
async def parallel(trial: Trial) -> None:
    request = trial.order()
    before = await trial.client.profile()
    clients = [trial.client, trial.connect()]
    calls = await asyncio.gather(*(clients[index % 2].told(request) for index in range(_AT_ONCE)))
    for told in calls:
        completed_of(told)
    ids = {event.operation_id for told in calls for event in told.events}
    expect(len(ids) == 1, "one operation", f"{len(ids)} operations")
    expect(all(same_events(calls[0], told) for told in calls), "the same events in each call", "no")
    after = await trial.client.profile()
    raised = after.pause_epoch - before.pause_epoch
    expect(raised <= 1, "at most one pause to take effect", f"the epoch rose by {raised}")


@case(
    "retry.another-connection",
    "A key belongs to the engine, not to the connection: a retry over another one finds the"
    " operation.",
)
async def another_connection(trial: Trial) -> None:
    request = trial.order()
    first = await trial.client.told(request)
    completed_of(first)
    other = trial.connect()
    async with trial.unchanged("a retry over another connection"):
        again = await other.told(request)
    expect(same_events(first, again), f"the events as before: {first}", again)


@case(
    "retry.expected-revision",
    "A retry of an order that named a revision finds the operation, although the revision has"
    " moved on.",
)
async def moved_on(trial: Trial) -> None:
    if not trial.offers(pb.ADMIN_OPERATION_KIND_PAUSE):
        raise NotPromised("the profile offers no order that surely moves the revision")
    revision = (await trial.client.profile()).revision
    request = trial.pause(expected_revision=revision)
    first = await trial.client.told(request)
    completed_of(first)
    again = await trial.client.told(request)
    expect(same_events(first, again), f"the events as before: {first}", again)


@case(
    "retry.after-a-failure",
    "A retry of an order that has failed tells the same failure again, and carries nothing out:"
    " whoever wants it done gives it a new key.",
    Need.INFERENCE,
)
async def after_a_failure(trial: Trial) -> None:
    key = trial.key()
    async with trial.outlasted(800, idempotency_key=key) as (first, _):
        pass
    async with trial.unchanged("a retry of an order that has failed"):
        request = trial.orders.pause(pb.PAUSE_MODE_DRAIN, idempotency_key=key, deadline_ms=800)
        again = await trial.client.told(request)
    expect(same_events(first, again), f"the events as before: {first}", again)


CASES: tuple[Case, ...] = (
    same_payload,
    effect_gone,
    other_payload,
    parallel,
    another_connection,
    moved_on,
    after_a_failure,
)
