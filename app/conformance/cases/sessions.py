"""Weight sessions: new weights in pieces, several calls that make one operation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc

from app.conformance import pieces as p
from app.conformance.case import Case, Need, NotPromised, case, expect
from app.conformance.client import Stream, brief, completed_of, ends_with
from app.conformance.orders import named
from app.conformance.record import Told
from app.conformance.tensors import altered
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

_C = grpc.StatusCode
_GIVEN = (Need.DESTRUCTIVE, Need.WEIGHTS, Need.COPY)
_LEASE_MS = 1_000


async def _as_before(trial: Trial, before: pb.AdminState, by: str) -> None:
    after = (await trial.client.profile()).state
    same = after.weights == before.weights
    expect(same, f"weights {brief(before.weights)} as before {by}", brief(after.weights))
    expect(
        after.admission == before.admission,
        f"admission {named(pb.AdmissionState, before.admission)} as before {by}",
        named(pb.AdmissionState, after.admission),
    )
    expect(not after.open_operations, "no open operation", brief(after.open_operations))


@asynccontextmanager
async def _in_vain(
    trial: Trial, by: str, *, lease_ms: int | None = None
) -> AsyncGenerator[tuple[p.Sender, Stream]]:
    """A session that begins, and after which all is as it was before."""
    with p.given(trial) as pieces:
        sender = p.Sender(trial, pieces)
        before = (await trial.client.profile()).state
        async with sender.begun(lease_ms=lease_ms) as stream:
            yield sender, stream
        await _as_before(trial, before, by)


def _harmless(told: Told) -> None:
    if ends_with(told, "failed"):
        effect = told.events[-1].failed.effect
        harmless = (pb.FAILURE_EFFECT_NONE, pb.FAILURE_EFFECT_ROLLED_BACK)
        expect(effect in harmless, "effect NONE or ROLLED_BACK", named(pb.FailureEffect, effect))


@case(
    "session.one-operation",
    "BEGIN, each CHUNK and COMMIT are answered by one stream of one operation, which says how many"
    " chunks are staged; until COMMIT the weights are those from before, and then the new ones with"
    " evidence from every rank.",
    *_GIVEN,
)
async def one_operation(trial: Trial) -> None:
    with p.given(trial) as pieces:
        sender = p.Sender(trial, pieces)
        before = await trial.client.profile()
        async with sender.begun() as stream:
            operation_id = stream.events[0].operation_id
            for index in range(sender.pieces):
                found = await sender.taken(sender.chunk(index))
                expect(found == operation_id, f"operation {operation_id} of a chunk", found)
                await sender.staged(stream, index + 1)
            during = (await trial.client.profile()).state
            same = during.weights == before.state.weights
            expect(same, f"weights {brief(before.state.weights)} still", brief(during.weights))
            named_open = [open_.operation_id for open_ in during.open_operations]
            expect(named_open == [operation_id], f"{operation_id} open", named_open)
            committed = await trial.client.told(sender.commit(sender.pieces))
            result = completed_of(committed).update_weights
            told = await stream.rest()
        expect(told.events == committed.events, "the same events for BEGIN and COMMIT", told)
        after = await trial.client.profile()
        version = after.state.weights.version
        expect(result.weight_version == version, f"version {result.weight_version}", version)
        ranks = sorted(one.rank for one in result.evidence if len(one.sha256) == 32)
        wanted = list(range(after.world_size))
        expect(ranks == wanted, f"evidence of ranks {wanted}", ranks)


@case(
    "session.retry",
    "Each call of a session, repeated under its key, is answered by the same operation and stages"
    " nothing twice; with another payload it is ALREADY_EXISTS.",
    *_GIVEN,
)
async def retry(trial: Trial) -> None:
    with p.given(trial) as pieces:
        sender = p.Sender(trial, pieces)
        async with sender.begun() as stream:
            operation_id = stream.events[0].operation_id
            for index in range(sender.pieces):
                chunk = sender.chunk(index)
                for _ in range(3):
                    found = await sender.taken(chunk)
                    expect(found == operation_id, f"operation {operation_id}", found)
                await sender.staged(stream, index + 1)
                other = sender.commit(sender.pieces)
                other.idempotency_key = chunk.idempotency_key
                await sender.turned_down(other, _C.ALREADY_EXISTS)
                by_key = await trial.client.operation(idempotency_key=chunk.idempotency_key)
                same = by_key.operation_id == operation_id
                expect(same, f"{operation_id} by the key of a chunk", by_key.operation_id)
            commit = sender.commit(sender.pieces)
            first = await trial.client.told(commit)
            completed_of(first)
        again = await trial.client.told(commit)
        expect(again.events == first.events, "the events as before", again)


@case(
    "session.order",
    "A chunk that is not the next one, of a session that is not open, or behind COMMIT is refused,"
    " and counts for nothing.",
    *_GIVEN,
)
async def order(trial: Trial) -> None:
    with p.given(trial) as pieces:
        sender, stranger = p.Sender(trial, pieces), p.Sender(trial, pieces)
        wrong = (_C.FAILED_PRECONDITION, _C.NOT_FOUND, _C.INVALID_ARGUMENT)
        await sender.turned_down(sender.chunk(0), *wrong)
        async with sender.begun() as stream:
            await sender.turned_down(sender.chunk(0, at=1), *wrong)
            await stranger.turned_down(stranger.chunk(0), *wrong)
            await sender.taken(sender.chunk(0))
            await sender.staged(stream, 1)
            await sender.turned_down(sender.chunk(0), *wrong)
            for index in range(1, sender.pieces):
                await sender.taken(sender.chunk(index))
            completed_of(await trial.client.told(sender.commit(sender.pieces)))
            await sender.turned_down(sender.chunk(0, at=sender.pieces), *wrong)


@case(
    "session.exclusive",
    "While a session is open, another one is ABORTED, naming it, and other requests are served.",
    *_GIVEN,
)
async def exclusive(trial: Trial) -> None:
    with p.given(trial) as pieces:
        sender, other = p.Sender(trial, pieces), p.Sender(trial, pieces)
        async with sender.begun() as stream:
            refusal = await other.turned_down(other.begin(), _C.ABORTED)
            operation_id = stream.events[0].operation_id
            expect(operation_id in str(refusal.metadata), f"{operation_id} named", refusal)
            health = await trial.client.health("openengine.v1.Inference")
            expect(health == "SERVING", "Inference SERVING during a session", health)


@case(
    "session.abort",
    "ABORT ends a session cancelled, with the weights, their version and admission as before.",
    *_GIVEN,
)
async def abort(trial: Trial) -> None:
    async with _in_vain(trial, "an ABORT") as (sender, stream):
        await sender.all_staged(stream)
        told = await trial.client.told(sender.abort())
        expect(ends_with(told, "cancelled"), "ABORT to end cancelled", told)


@case(
    "session.lease",
    "A session that nothing is heard of for its lease ends by itself, and not completed, with the"
    " weights as before.",
    *_GIVEN,
)
async def lease(trial: Trial) -> None:
    async with _in_vain(trial, "a lease that ran out", lease_ms=_LEASE_MS) as (_, stream):
        told = await stream.rest()
        expect(p.end_of(told) != "completed", "a silent session not to complete", told)
        _harmless(told)


@case(
    "session.count",
    "A COMMIT that names another number of chunks than were accepted commits nothing, and ends the"
    " session.",
    *_GIVEN,
)
async def count(trial: Trial) -> None:
    async with _in_vain(trial, "a miscounted COMMIT") as (sender, stream):
        await sender.all_staged(stream)
        wrong = await trial.client.told(sender.commit(sender.pieces + 1))
        if wrong.refusal is None:
            expect(p.end_of(wrong) != "completed", "a miscounted COMMIT not to complete", wrong)
            _harmless(wrong)


@case(
    "session.answers",
    "What a session stages answers nothing before COMMIT and nothing after ABORT; after COMMIT it"
    " is what answers.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
    Need.WEIGHTS,
    Need.COPY,
    Need.SHARED,
)
async def answers(trial: Trial) -> None:
    p.require(trial)
    if p.IPC not in trial.profile.weight_sessions:
        raise NotPromised("the profile does not offer weight sessions by ipc")
    await trial.stock.given()
    before = await trial.stock.answer()
    with p.in_memory(trial, altered(trial.stock.copy)) as pieces:
        called_off = p.Sender(trial, pieces)
        async with called_off.begun() as stream:
            await called_off.all_staged(stream)
            await trial.stock.answers_as(before, "while other weights are staged")
        await trial.stock.answers_as(before, "after an ABORT")
        sender = p.Sender(trial, pieces)
        async with sender.begun() as stream:
            await sender.all_staged(stream)
            completed_of(await trial.client.told(sender.commit(sender.pieces)))
    after = await trial.stock.answer()
    expect(after != before, "another answer from other weights", repr(after[1]))


@case(
    "session.restart",
    "A restart in the middle of a session ends it failed with ENGINE_RESTARTED; the key of a chunk"
    " still finds it, its version is not the engine's, and it takes nothing more.",
    *_GIVEN,
    Need.HOOK,
)
async def restart(trial: Trial) -> None:
    with p.given(trial) as pieces:
        sender = p.Sender(trial, pieces)
        begin = sender.begin()
        stream = trial.client.send(begin)
        operation_id = (await stream.first()).operation_id
        chunk = sender.chunk(0)
        await sender.taken(chunk)
        await sender.staged(stream, 1)
        stream.detach()
        version = (await trial.restart()).state.weights.version
        told = await trial.client.told(chunk)
        found = {event.operation_id for event in told.events}
        expect(found == {operation_id}, f"{operation_id} by the key of a chunk", told)
        expect(ends_with(told, "failed"), "the session to have failed", told)
        reason = told.events[-1].failed.reason
        expect(reason == "ENGINE_RESTARTED", "ENGINE_RESTARTED", reason)
        expect(version != begin.weight_version, "a version from before the session", version)
        gone = (_C.NOT_FOUND, _C.FAILED_PRECONDITION)
        await sender.turned_down(sender.commit(1), *gone)


CASES: tuple[Case, ...] = (
    one_operation,
    retry,
    order,
    exclusive,
    abort,
    lease,
    count,
    answers,
    restart,
)
