"""Giving orders: what is taken on, what is refused before anything reaches the engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from typing import Any

import pytest

from app.domain.commands import AbortRequests, Command, FlushCaches, Pause, Resume
from app.domain.errors import (
    ChadburnError,
    EngineBusy,
    EngineUnreachable,
    IdempotencyKeyReused,
    InvalidArgument,
    MalformedIdempotencyKey,
    MissingIdempotencyKey,
    NotCancellable,
    NotPaused,
    OperationEnded,
    RevisionMismatch,
    StalePauseEpoch,
    UnknownEngine,
    UnknownOperation,
    UnsupportedOperation,
)
from app.domain.kinds import CacheKind, NewRequests, OperationState, PauseMode, Verification
from app.ledger.values import AuditFilter
from tests.doubles.engine import EngineDouble
from tests.enginekit.client import client_of
from tests.enginekit.minimal_engine import hang
from tests.operations.gateway import CALLER, DRAIN, FLUSH, Gateway, request, until

pytestmark = pytest.mark.anyio

_READS = frozenset({"GetAdminProfile", "GetServerInfo", "GetModelInfo", "GetLoad"})


def orders_at(engine: EngineDouble) -> Counter[str]:
    """Calls that are more than looking."""
    return Counter({name: n for name, n in engine.rpcs.items() if name not in _READS})


class TestTakingOn:
    async def test_an_order_is_carried_out_and_told(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        operation = await gateway.give(DRAIN)
        assert operation.state is OperationState.ACCEPTED
        ended = await gateway.end_of(operation)
        assert ended.state is OperationState.SUCCEEDED
        assert ended.verification is Verification.VERIFIED
        assert ended.result is not None
        assert ended.result["changed"] is True
        assert ended.engine_instance_id == engine.instance_id
        types = await gateway.types_of(operation.id)
        assert (types[:2], types[-1]) == (["accepted", "dispatched"], "completed")
        assert engine.received.count(("Pause", operation.id)) == 1

    async def test_who_hears_of_the_end_sees_its_effect(self, gateway: Gateway) -> None:
        """Pause and resume, each judged by what the one before has left."""
        for round_number in range(3):
            paused = await gateway.end_of(await gateway.give(DRAIN))
            assert paused.result is not None
            engine = await gateway.fleet.engine("e1")
            facts = engine.observed.facts
            assert facts is not None
            assert facts.pause is not None, round_number
            assert facts.pause.by == paused.id
            assert facts.pause_epoch == paused.result["pause_epoch"]
            resume = Resume(pause_epoch=facts.pause_epoch)
            resumed = await gateway.end_of(await gateway.give(resume))
            assert resumed.state is OperationState.SUCCEEDED

    async def test_a_replay_gives_the_same_operation(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        first = await gateway.orders.submit(request(key="k", fingerprint="f"))
        await gateway.end_of(first.operation)
        again = await gateway.orders.submit(request(key="k", fingerprint="f"))
        assert (again.operation.id, again.fresh) == (first.operation.id, False)
        assert orders_at(engine)["Pause"] == 1

    async def test_a_replay_comes_before_everything_that_may_have_changed(
        self, gateway: Gateway
    ) -> None:
        paused = await gateway.end_of(await gateway.give(DRAIN))
        assert paused.result is not None
        epoch = paused.result["pause_epoch"]
        assert isinstance(epoch, int)
        lift = request(Resume(pause_epoch=epoch), key="lift", expected_revision=paused.revision)
        first = await gateway.orders.submit(lift)
        await gateway.end_of(first.operation)
        # The epoch and the revision are stale by now, and the engine is not paused.
        assert (await gateway.orders.submit(lift)).operation.id == first.operation.id

    async def test_a_key_used_for_another_order_is_refused(self, gateway: Gateway) -> None:
        first = await gateway.give(key="k", fingerprint="f")
        with pytest.raises(IdempotencyKeyReused) as refused:
            await gateway.give(key="k", fingerprint="other")
        assert refused.value.operation_id == first.id

    async def test_fifty_at_once_are_one_order(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        wanted = request(key="k", fingerprint="f")
        answers = await asyncio.gather(*(gateway.orders.submit(wanted) for _ in range(50)))
        assert len({answer.operation.id for answer in answers}) == 1
        assert [answer.fresh for answer in answers].count(True) == 1
        ended = await gateway.end_of(answers[0].operation)
        assert ended.state is OperationState.SUCCEEDED
        assert engine.received.count(("Pause", ended.id)) == 1
        assert len(engine.orders) == 1

    async def test_of_two_that_race_one_is_told_of_the_other(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.engine.script("prepare", hang)
        answers = await asyncio.gather(
            *(gateway.orders.submit(request(FLUSH)) for _ in range(2)), return_exceptions=True
        )
        busy = [answer for answer in answers if isinstance(answer, EngineBusy)]
        taken = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert (len(busy), len(taken)) == (1, 1)
        assert busy[0].operation_id == taken[0].operation.id

    async def test_a_client_that_leaves_takes_nothing_with_it(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        for wait_s in (0, 0.001, 0.003, 0.01):
            asking = asyncio.ensure_future(gateway.give(FLUSH, key=f"k-{wait_s}"))
            await asyncio.sleep(wait_s)
            asking.cancel()
            await asyncio.wait({asking})
            again = await gateway.give(FLUSH, key=f"k-{wait_s}")
            assert (await gateway.end_of(again)).state is OperationState.SUCCEEDED
        assert len(engine.orders) == 4

    async def test_aborts_run_beside_a_drain(self, gateway: Gateway, engine: EngineDouble) -> None:
        engine.engine.script("prepare", hang)
        drain = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        abort = await gateway.end_of(await gateway.give(AbortRequests(request_ids=("r-1", "r-2"))))
        assert abort.state is OperationState.SUCCEEDED
        assert abort.result is not None
        assert abort.result["requests"] == [
            {"request_id": "r-1", "outcome": "not_found"},
            {"request_id": "r-2", "outcome": "not_found"},
        ]
        assert not (await gateway.ledger.operations.get(drain.id)).done  # type: ignore[union-attr]

    async def test_a_deadline_is_kept_in_the_ledger_and_told_to_the_engine(
        self, gateway: Gateway
    ) -> None:
        operation = await gateway.give(DRAIN, deadline_ms=5_000)
        assert operation.deadline_at is not None
        assert (operation.deadline_at - operation.created_at).total_seconds() == 5.0


class TestRefusals:
    """None of these may send anything but a look at the engine."""

    @pytest.mark.parametrize(
        ("command", "more", "refusal"),
        [
            (Resume(pause_epoch=99), {}, StalePauseEpoch),
            (DRAIN, {"expected_revision": 99}, RevisionMismatch),
            (FlushCaches(caches=(CacheKind.ENCODER,)), {}, UnsupportedOperation),
            (dataclasses.replace(DRAIN, model="nobody"), {}, InvalidArgument),
            (DRAIN, {"deadline_ms": 0}, InvalidArgument),
            (DRAIN, {"deadline_ms": 10**12}, InvalidArgument),
            (DRAIN, {"key": None}, MissingIdempotencyKey),
            (DRAIN, {"key": "ünïcode"}, MalformedIdempotencyKey),
            (DRAIN, {"engine_id": "nobody"}, UnknownEngine),
        ],
    )
    async def test_they_reach_no_engine_and_leave_no_operation(
        self,
        gateway: Gateway,
        engine: EngineDouble,
        command: Command,
        more: dict[str, Any],
        refusal: type[ChadburnError],
    ) -> None:
        with pytest.raises(refusal):
            await gateway.give(command, **more)
        assert not orders_at(engine)
        assert await gateway.ledger.operations.open_ones() == ()
        page = await gateway.ledger.audit.page(AuditFilter())
        assert (page.items[0].entry.outcome, page.items[0].entry.reason) == (
            "refused",
            refusal.reason,
        )

    async def test_a_mismatch_knows_where_the_revision_came_from(self, gateway: Gateway) -> None:
        with pytest.raises(RevisionMismatch) as refused:
            await gateway.give(DRAIN, expected_revision=99, revision_from_header=True)
        assert refused.value.from_header

    async def test_a_resume_without_a_pause(self, gateway: Gateway) -> None:
        paused = await gateway.end_of(await gateway.give(DRAIN))
        assert paused.result is not None
        epoch = paused.result["pause_epoch"]
        assert isinstance(epoch, int)
        await gateway.end_of(await gateway.give(Resume(pause_epoch=epoch)))
        with pytest.raises(NotPaused):
            await gateway.give(Resume(pause_epoch=epoch))

    async def test_nobody_is_refused_by_facts_that_were_just_overtaken(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        """Another gateway pauses; this one has read the engine a moment before."""
        await gateway.fleet.reread("e1", 5.0)
        await _pause_directly(engine)
        before = (await gateway.fleet.engine("e1")).observed.facts
        assert before is not None
        epoch = before.pause_epoch + 1
        ended = await gateway.end_of(await gateway.give(Resume(pause_epoch=epoch)))
        assert ended.state is OperationState.SUCCEEDED

    async def test_an_engine_that_never_answered_is_not_judged(self, gateway: Gateway) -> None:
        await gateway.register("127.0.0.1:1", "e2", 0.0)
        with pytest.raises(EngineUnreachable):
            await gateway.give(DRAIN, "e2")

    async def test_an_engine_that_is_silent_now_is_judged_by_what_is_known(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.delays_s["GetAdminProfile"] = 30.0
        gateway.clock.go(60)
        loop = asyncio.get_running_loop()
        began = loop.time()
        operation = await gateway.give(DRAIN)
        # It waited for the engine for 300 ms at most, not for the 30 s.
        assert loop.time() - began < 3.0
        assert operation.state is OperationState.ACCEPTED
        engine.delays_s.clear()
        assert (await gateway.end_of(operation)).state is OperationState.SUCCEEDED


class TestPlanning:
    async def test_a_plan_says_what_would_happen_and_does_nothing(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        plan = await gateway.orders.plan(request(DRAIN, key=None))
        facts = (await gateway.fleet.engine("e1")).observed.facts
        assert facts is not None
        assert plan["would"] == "accept"
        assert plan["kind"] == "pause"
        assert plan["request"] == {"mode": "drain", "new_requests": "hold"}
        assert plan["revision"] == facts.revision
        assert plan["running_operation"] is None
        assert plan["deadline_ms"] == 600_000
        assert plan["effect"] == (
            "Lets 0 running and 0 queued requests finish, and holds new ones until it is resumed."
        )
        assert not orders_at(engine)
        assert await gateway.ledger.operations.open_ones() == ()

    @pytest.mark.parametrize(
        ("command", "effect"),
        [
            (FLUSH, "Empties the caches prefix."),
            (
                Pause(mode=PauseMode.ABORT, new_requests=NewRequests.REFUSE),
                "Ends 0 running and 0 queued requests, and refuses new ones until it is resumed.",
            ),
            (AbortRequests(all=True), "Ends all requests: 0 running, 0 queued, 0 held."),
            (
                AbortRequests(request_ids=("a", "b")),
                "Ends 2 requests by id, those that are still there.",
            ),
        ],
    )
    async def test_each_kind_has_its_sentence(
        self, gateway: Gateway, command: Command, effect: str
    ) -> None:
        assert (await gateway.orders.plan(request(command)))["effect"] == effect

    async def test_of_a_paused_engine(self, gateway: Gateway) -> None:
        paused = await gateway.end_of(await gateway.give(DRAIN))
        assert paused.result is not None
        epoch = paused.result["pause_epoch"]
        assert isinstance(epoch, int)
        again = await gateway.orders.plan(request(DRAIN))
        assert again["effect"] == "Changes nothing: the engine is paused in mode drain already."
        lift = await gateway.orders.plan(request(Resume(pause_epoch=epoch)))
        assert lift["effect"] == (
            f"Lifts pause {epoch} (drain): 0 frozen requests continue and 0 held ones are let in."
        )

    async def test_it_is_refused_as_the_order_would_be(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        with pytest.raises(StalePauseEpoch):
            await gateway.orders.plan(request(Resume(pause_epoch=9)))
        engine.engine.script("prepare", hang)
        running = await gateway.give(FLUSH)
        with pytest.raises(EngineBusy) as busy:
            await gateway.orders.plan(request(FLUSH))
        assert busy.value.operation_id == running.id
        beside = await gateway.orders.plan(request(AbortRequests(all=True)))
        assert beside["running_operation"] == running.id


class TestWaitingAndCancelling:
    async def test_waiting_ends_with_the_operation_or_the_time(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.engine.script("prepare", hang)
        operation = await gateway.give(FLUSH)
        assert not (await gateway.orders.wait(operation.id, 0.05)).done
        with pytest.raises(UnknownOperation):
            await gateway.orders.wait("nobody", 1.0)

    async def test_a_drain_is_cancelled_at_the_engine(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.engine.script("prepare", hang)
        operation = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        cancelled = await gateway.orders.cancel(operation.id, CALLER)
        assert cancelled.state is OperationState.CANCELLING
        again = await gateway.orders.cancel(operation.id, CALLER)
        assert again.cancel_requested
        ended = await gateway.end_of(operation)
        assert ended.state is OperationState.CANCELLED
        facts = (await gateway.fleet.engine("e1")).observed.facts
        assert facts is not None
        assert facts.admission.value == "open"
        with pytest.raises(OperationEnded):
            await gateway.orders.cancel(operation.id, CALLER)

    async def test_a_cancellation_right_after_the_order(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        """Wherever the order is at that moment, it ends, and not as something else."""
        engine.engine.script("prepare", hang)
        for _ in range(10):
            operation = await gateway.give(DRAIN)
            await gateway.orders.cancel(operation.id, CALLER)
            assert (await gateway.end_of(operation)).state is OperationState.CANCELLED

    async def test_what_was_not_sent_is_cancelled_at_once(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        await gateway.fleet.reread("e1", 5.0)
        await engine.kill()
        gateway.clock.go(60)
        operation = await gateway.give(DRAIN)
        ended = await gateway.orders.cancel(operation.id, CALLER)
        assert ended.state is OperationState.CANCELLED
        assert orders_at(engine)["Pause"] == 0
        await engine.start()
        await gateway.end_of(await gateway.give(FLUSH))
        assert orders_at(engine)["Pause"] == 0

    async def test_what_an_engine_does_not_cancel_is_refused(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.delays_s["Abort"] = 0.5
        operation = await gateway.give(AbortRequests(all=True))
        await gateway.until(operation, OperationState.RUNNING)
        with pytest.raises(NotCancellable):
            await gateway.orders.cancel(operation.id, CALLER)
        with pytest.raises(UnknownOperation):
            await gateway.orders.cancel("nobody", CALLER)
        await gateway.end_of(operation)


class TestAudit:
    async def test_an_order_and_its_end_are_two_entries(self, gateway: Gateway) -> None:
        operation = await gateway.end_of(await gateway.give(DRAIN, reason="upgrade", source="::1"))
        page = await gateway.ledger.audit.page(AuditFilter(operation_id=operation.id))
        end, start = (each.entry for each in page.items)
        assert (start.action, start.outcome, start.note) == ("pause", "accepted", "upgrade")
        assert (start.source, end.outcome) == ("::1", "succeeded")
        assert start.actor == end.actor == operation.actor

    async def test_a_cancellation_is_one_too(self, gateway: Gateway, engine: EngineDouble) -> None:
        engine.engine.script("prepare", hang)
        operation = await gateway.give(DRAIN)
        await gateway.orders.cancel(operation.id, CALLER)
        await gateway.end_of(operation)
        page = await gateway.ledger.audit.page(AuditFilter(operation_id=operation.id))
        assert Counter((each.entry.action, each.entry.outcome) for each in page.items) == {
            ("pause", "accepted"): 1,
            ("cancel", "accepted"): 1,
            ("pause", "cancelled"): 1,
        }


async def _pause_directly(engine: EngineDouble) -> None:
    async with client_of(engine) as client:
        await client.completed(client.pause())
