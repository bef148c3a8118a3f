"""The suite passes on the kit's own minimal engine, and says what that does not prove."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.conformance.case import Verdict
from app.conformance.catalogue import catalogue
from app.rpc.openengine.v1 import admin_pb2
from tests.conformance.faulty import Fault
from tests.conformance.judging import (
    complete_engine,
    failures,
    ids_of,
    judged,
    options_for,
    paced_engine,
)
from tests.conformance.session_engine import PiecewiseEngine
from tests.enginekit.client import client_of
from tests.enginekit.minimal_engine import MinimalEngine

pytestmark = pytest.mark.anyio

# The minimal engine has one model, can cancel a drain, asks for no token, and offers no more than
# pause, resume, flush and abort.
NOT_SHOWN = {"refusal.model-required", "cancel.not-offered"}
NOT_SHOWN |= {
    f"credentials.{name}"
    for name in ("required", "forged", "refused", "of-inference", "inference-required")
}
NOT_SHOWN_BY_COMPLETE = NOT_SHOWN | {
    f"unsupported.{name}" for name in ("operations", "stop-profile", "adapters")
}
NOT_OFFERED = (
    "session.",
    "profiling.",
    "release.",
    "update.",
    "reconfigure.",
    "lora.",
    "kvevents.",
)


async def test_the_minimal_engine_passes(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double:
        report = await judged(options_for(double))
        assert not failures(report)
        absent = ids_of(report, Verdict.NOT_APPLICABLE)
        unexpected = {id_ for id_ in absent - NOT_SHOWN if not id_.startswith(NOT_OFFERED)}
        # Of a group that is offered, and still of orders that are not.
        assert unexpected == {
            "busy.every-order",
            "rank.killed-during-an-update",
            "rank.stopped-at-an-update",
        }
        assert len(report.findings) == len(catalogue())
        async with client_of(double) as client:
            state = (await client.profile()).state
        assert state.admission == admin_pb2.ADMISSION_STATE_OPEN
        assert not state.open_operations


async def test_several_models_and_one_pause_mode(tmp_path: Path) -> None:
    def make() -> MinimalEngine:
        engine = MinimalEngine(models=("one", "two"))
        modes = frozenset(list(engine.offered.pause_modes)[:1])
        engine.offered = engine.offered.__class__(
            operations=engine.offered.operations,
            cache_kinds=engine.offered.cache_kinds,
            pause_modes=modes,
        )
        return engine

    async with paced_engine(tmp_path, make_engine=make) as double:
        report = await judged(options_for(double, inference=None, hook=None, destructive=False))
        assert not failures(report)
        assert "refusal.model-required" in ids_of(report, Verdict.PASS)
        assert "epoch.another-mode" in ids_of(report, Verdict.NOT_APPLICABLE)


async def test_an_engine_that_can_only_flush(tmp_path: Path) -> None:
    def make() -> MinimalEngine:
        engine = MinimalEngine()
        engine.offered = engine.offered.__class__(
            operations=frozenset(k for k in engine.offered.operations if k == "flush_caches"),
            cache_kinds=engine.offered.cache_kinds,
        )
        return engine

    async with paced_engine(tmp_path, make_engine=make) as double:
        report = await judged(options_for(double, hook=None))
        assert not failures(report)
        passed = ids_of(report, Verdict.PASS)
        assert {"unsupported.operations", "retry.same-payload", "stream.gap-free"} <= passed
        assert "pause.each-mode" in ids_of(report, Verdict.NOT_APPLICABLE)


async def test_without_address_hook_and_permission_it_says_what_is_not_proven(
    tmp_path: Path,
) -> None:
    async with paced_engine(tmp_path) as double:
        options = options_for(double, inference=None, hook=None, destructive=False)
        report = await judged(options, "pause.*", "restart.*", "rank.*", "abort.*")
    assert not failures(report)
    missing = {f.case.id: f.reason for f in report.of(Verdict.NOT_APPLICABLE)}
    assert "--inference" in missing["pause.hold"]
    assert "--fault-hook" in missing["restart.keys-are-kept"]
    assert "--destructive" in missing["abort.all"]
    assert {"restart.new-instance", "rank.killed"} <= set(missing)


async def test_a_complete_engine_passes_everything_that_it_offers(tmp_path: Path) -> None:
    """Behind the interceptor in which the faults of the wrong servers sit: by itself it changes
    nothing."""
    fault = Fault()
    engine = PiecewiseEngine
    async with complete_engine(tmp_path, engine=engine, interceptors=[fault]) as (double, given):
        fault.double = double
        report = await judged(options_for(double, **given))
    assert not failures(report)
    assert ids_of(report, Verdict.NOT_APPLICABLE) == NOT_SHOWN_BY_COMPLETE
