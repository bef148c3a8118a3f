"""A plugin for scripts/mutation-test: in place of the tests once, those of each mutant in turn.

Each in a process of its own, forked where everything is imported and collected, so that a mutant
costs its tests alone. One that fails is enough: first come those that have noticed most of the
module's other mutants, then the quickest. `MUTANTS` in the environment names a file: by mutant, its
tests. The outcomes go into a file beside it, line by line. Python gets MUTANT_UNDER_TEST from here,
where mutmut's mutants look for it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

NOTES = Path("mutmut-stats.json")
LEAST_S, TIMES = 30, 20


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    todo = Path(os.environ["MUTANTS"])
    seconds: dict[str, float] = json.loads(NOTES.read_text(encoding="utf-8"))["duration_by_test"]
    known = {item.nodeid: item for item in session.items}
    noticed: defaultdict[str, Counter[str]] = defaultdict(Counter)
    gc.freeze()  # else every child would copy what its collections look at
    with todo.with_suffix(".outcomes").open("a", encoding="utf-8") as outcomes:
        for mutant, tests in json.loads(todo.read_text(encoding="utf-8")).items():
            best = noticed[mutant.rpartition(".")[0]]
            order = sorted(
                known.keys() & tests, key=lambda test: (-best[test], seconds.get(test, 0.0))
            )
            limit_s = LEAST_S + TIMES * sum(seconds.get(test, 0.0) for test in order)
            found, by = outcome(mutant, [known[test] for test in order], limit_s)
            best[by] += 1
            print(json.dumps([mutant, found]), file=outcomes, flush=True)
    return True


def outcome(mutant: str, items: list[pytest.Item], limit_s: float) -> tuple[str, str]:
    """What came of it, and the test that noticed, if one did."""
    if not items:
        return "no test", ""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.environ["MUTANT_UNDER_TEST"] = mutant
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(limit_s))
        test = first_failed(items)
        os.write(writing, test.encode())
        os._exit(bool(test))
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        by = told.read().decode()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        return "timeout", by
    return "killed" if code else "survived", by


def first_failed(items: list[pytest.Item]) -> str:
    for item, following in zip(items, [*items[1:], None], strict=True):
        reports = runtestprotocol(item, log=False, nextitem=following)
        if any(report.failed for report in reports):
            return item.nodeid
    return ""
