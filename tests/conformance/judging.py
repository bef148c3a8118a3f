"""Running cases against an engine in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.conformance.case import Verdict
from app.conformance.catalogue import catalogue, chosen
from app.conformance.connection import Listener
from app.conformance.placing import Places
from app.conformance.report import Report
from app.conformance.suite import run_suite
from app.conformance.tensors import written
from app.conformance.trial import Options
from tests.conformance.complete_engine import PREFIX, CompleteEngine, weights_of
from tests.conformance.paced_engine import InProcessHook, PacedEngine
from tests.doubles.engine import EngineDouble, running_engine

# What a right engine does in milliseconds, with what a busy machine may add.
PATIENCE_S = 20.0


@asynccontextmanager
async def paced_engine(data_dir: Path, **settings: Any) -> AsyncIterator[EngineDouble]:
    """Two ranks, and little patience with those that do not answer."""
    settings = {
        "make_engine": lambda: PacedEngine(world_size=2),
        "cancel_grace_s": 0.2,
        "rollback_timeout_s": 0.5,
        "max_message_bytes": 1024 * 1024,
        **settings,
    }
    async with running_engine(data_dir, **settings) as double:
        yield double


def options_for(double: EngineDouble, **changed: Any) -> Options:
    """Everything that the suite can be given."""
    given: dict[str, Any] = {
        "admin": Listener(address=double.admin_address),
        "inference": Listener(address=double.inference_address),
        "hook": InProcessHook(double),
        "destructive": True,
        "patience_s": PATIENCE_S,
        **changed,
    }
    return Options(**given)


async def judged(options: Options, *ids: str) -> Report:
    """All cases without ids; patterns are taken too."""
    return await run_suite(chosen(catalogue(), ids), options)


def ids_of(report: Report, verdict: Verdict) -> set[str]:
    return {finding.case.id for finding in report.of(verdict)}


def failures(report: Report) -> list[str]:
    """Readable, for an assertion."""
    found = [f"{finding.case.id}: {finding.why}" for finding in report.of(Verdict.FAIL)]
    return found + ([report.left_behind] if report.left_behind else [])


def reasons(report: Report, ids: Sequence[str]) -> dict[str, str]:
    return {finding.case.id: finding.why for finding in report.findings if finding.case.id in ids}


@asynccontextmanager
async def complete_engine(
    folder: Path, *, engine: type[CompleteEngine] = CompleteEngine, **settings: Any
) -> AsyncIterator[tuple[EngineDouble, dict[str, Any]]]:
    """With the options that let the suite load weights. The weights it is given are others than
    those it begins with."""
    root = folder / "weights"
    given, scratch, adapter = root / "next", root / "scratch", root / "adapter"
    for below in (given, scratch, adapter):
        below.mkdir(parents=True)
    (given / "model.safetensors").write_bytes(written(weights_of(2)))

    def make() -> CompleteEngine:
        made = engine(world_size=2)
        made.root = made.lora_root = root
        return made

    options = {
        "weights": str(given),
        "weights_copy": given,
        "lora": str(adapter),
        "places": Places(scratch=scratch, shared_prefix=PREFIX),
    }
    async with paced_engine(folder / "engine", make_engine=make, **settings) as double:
        yield double, options
