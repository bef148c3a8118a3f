"""How an order of an engine was tried: by which tests, against what.

Tests against the doubles run in `make test`; those against real engines where somebody has built
one, so that what their last run came to lies here, in `runs/`: a test that did not run and pass
there proves nothing. `scripts/gen-engine-matrix --record NAME` writes that of a whole run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from app.domain.kinds import OperationKind as Kind
from tests.engines.offers import CORE, ROOT, Way
from tests.engines.orders import Test, tests_in, tests_of

RUNS = Path(__file__).parent / "runs"
TESTS = ROOT / "tests"
# Cases of the conformance suite that carry an order out, and see what it did.
PROVING = {
    "pause.each-mode": (Kind.PAUSE, Kind.RESUME),
    "abort.one": (Kind.ABORT_REQUESTS,),
    "release.round": (Kind.RELEASE_RESOURCES, Kind.RESTORE_RESOURCES),
    "update.version-moves-with-success": (Kind.UPDATE_WEIGHTS,),
    "lora.round": (Kind.LOAD_LORA, Kind.UNLOAD_LORA),
    "profiling.round": (Kind.PROFILE,),
    "reconfigure.limit": (Kind.RECONFIGURE_SERVING,),
    "reconfigure.ranks": (Kind.RECONFIGURE_SERVING,),
}


class Means(IntEnum):
    """The more, the nearer to what runs in earnest."""

    NOTHING = 0
    DOUBLE = 1  # written from what is documented
    REPLAY = 2  # a double that recorded calls are replayed against
    RUNTIME = 3  # the real server around callbacks of the tests' own
    REAL = 4


@dataclass(frozen=True, slots=True)
class Run:
    """The last run of tests/`name`. `against`: what was real of it. `tests`: those that
    passed; `cases`: of the conformance suite, by whom it was run."""

    name: str
    against: str
    means: Means
    on: str
    tests: frozenset[str]
    cases: frozenset[str]

    @classmethod
    def of(cls, path: Path) -> Run:
        told: dict[str, Any] = json.loads(path.read_text())
        return cls(
            name=path.stem,
            against=told["against"],
            means=Means[told["means"].upper()],
            on=told["on"],
            tests=frozenset(told["tests"]),
            cases=frozenset(told["cases"]),
        )


def runs() -> dict[str, Run]:
    return {path.stem: Run.of(path) for path in sorted(RUNS.glob("*.json"))}


def tried(way: Way, recorded: dict[str, Run]) -> dict[Kind, Means]:
    """The best that there is for each order that it offers."""
    found = dict.fromkeys(way.offers, Means.NOTHING)

    def proved(kinds: frozenset[Kind] | tuple[Kind, ...], means: Means) -> None:
        for kind in kinds:
            if kind in found:
                found[kind] = max(found[kind], means)

    for test, means in _tests(way):
        proved(test.kinds, means)
    run = recorded.get(_engine(way))
    if run is not None:
        for test in tests_in(TESTS / run.name, below=True):
            if test.id in run.tests and _dialect(test) == way.key.startswith("backends/"):
                proved(test.kinds, run.means)
        if way.key.startswith("sidecars/"):
            for case in run.cases:
                proved(PROVING.get(case, ()), run.means)
    return found


def _engine(way: Way) -> str:
    return way.key.rpartition("/")[2]


def _tests(way: Way) -> list[tuple[Test, Means]]:
    """Those of every run of all tests."""
    engine = _engine(way)
    if way.key.startswith("sidecars/"):
        recorded = (TESTS / "doubles" / f"{engine}_recorded.jsonl").exists()
        means = Means.REPLAY if recorded else Means.DOUBLE
        own = TESTS / "sidecars" / engine
        whole = own.is_dir()  # the first sidecar's lie beside the folders of the later ones
        return [(test, means) for test in tests_in(own if whole else own.parent, below=whole)]
    if way.key == CORE:
        return [
            (test, Means.DOUBLE)
            for path in sorted(TESTS.rglob("test_core_control*.py"))
            for test in tests_of(path)
        ]
    if way.key.startswith("backends/"):
        return [
            (test, Means.REPLAY)
            for path in sorted(TESTS.rglob("test_*.py"))
            if f"doubles.{engine}_control" in path.read_text()
            for test in tests_of(path)
        ]
    return [(test, Means.REAL) for test in tests_in(TESTS / way.key, below=True)]


def _dialect(test: Test) -> bool:
    """Whether the engine of this test is spoken to by the gateway itself."""
    return "dialect" in test.file or "_control" in test.file
