"""Hold a recorded history against the named guarantees.

`python -m tests.robustness.check FILE [NAME …]` prints what breaks which of them, and ends with 1
if anything does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.robustness import guarantees, stream_guarantees
from tests.robustness.guarantees import Check
from tests.robustness.history import History, read

CHECKS: Mapping[str, Check] = {
    check.__name__.replace("_", "-"): check
    for check in (
        guarantees.acknowledged_not_lost,
        guarantees.every_operation_ends,
        guarantees.done_once_at_the_engine,
        guarantees.key_admitted_once,
        guarantees.terminal_never_changes,
        stream_guarantees.terminal_once,
        stream_guarantees.ordered,
        stream_guarantees.unique,
        stream_guarantees.gap_free,
        stream_guarantees.resumable,
        stream_guarantees.nothing_behind_a_delivered_position,
        guarantees.one_exclusive_at_a_time,
        guarantees.nothing_after_its_deadline,
        guarantees.ledger_order_is_engine_order,
    )
}


def broken(history: History, names: Iterable[str] = CHECKS) -> list[str]:
    """A line for each thing that breaks one of them. Raises KeyError for a name of none, and
    ValueError for a history whose end was not written down: it proves nothing."""
    if not history.is_whole:
        raise ValueError("the ledger was not read at the end of this history")
    return [f"{name}: {said}" for name in names for said in CHECKS[name](history)]


def hold(path: Path, names: Iterable[str] = CHECKS) -> History:
    """The history, which keeps them all. For tests."""
    found = read(path)
    lines = broken(found, names)
    assert not lines, "\n".join([f"seed {found.begun.seed}, {path}", *lines[:20]])
    return found


def main(arguments: list[str]) -> int:
    path, *names = arguments
    found = read(Path(path))
    print(f"{path}: seed {found.begun.seed}, {len(found.lines)} lines, {dict(found.begun.about)}")
    lines = broken(found, names or CHECKS)
    for line in lines:
        print(line)
    print(f"{len(names or CHECKS)} guarantees, {len(lines)} violations")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
