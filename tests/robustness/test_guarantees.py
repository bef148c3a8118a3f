"""A guarantee that no history could break would prove nothing: each is shown wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.check import CHECKS, broken, hold, main
from tests.robustness.history import (
    Answered,
    Arrived,
    Asked,
    Begun,
    Carried,
    Closed,
    Connected,
    Delivered,
    EngineLife,
    Entry,
    History,
    LedgerEvent,
    LedgerOperation,
    LedgerRead,
    Looked,
    Opened,
    Recorder,
    Said,
    Saw,
    Struck,
    Told,
    Unanswered,
    history,
    read,
)

TYPES = {1: "accepted", 2: "dispatched", 3: "completed"}
# The events of two operations on one engine: position, operation, sequence.
EVENTS = [(1, "a", 1), (2, "a", 2), (4, "a", 3), (5, "b", 1), (7, "b", 2), (8, "b", 3)]


def told(connection: str, position: int, operation: str, sequence: int) -> Delivered:
    return Delivered(
        connection=connection,
        position=position,
        operation=operation,
        engine="e1",
        sequence=sequence,
        type=TYPES[sequence],
        state="succeeded" if sequence == 3 else None,
    )


def done_at_engine(key: str) -> list[Entry]:
    return [
        Arrived(engine="e1", key=key, kind="pause"),
        Told(engine="e1", key=key, type="accepted"),
        Carried(engine="e1", key=key, phase="begun"),
        Carried(engine="e1", key=key, phase="done"),
        Told(engine="e1", key=key, type="completed"),
    ]


def ordered_by(call: str, operation: str) -> list[Entry]:
    """Asked without an answer, then with one."""
    order = Asked(call=call, principal="ada", key=f"k-{operation}", engine="e1", kind="pause")
    return [
        order,
        Unanswered(call=call, why="ReadError"),
        replace(order, call=f"{call}-again"),
        Answered(call=f"{call}-again", status=202, operation=operation, state="accepted"),
    ]


def stored(ordinal: int, operation: str) -> LedgerOperation:
    return LedgerOperation(
        ordinal=ordinal,
        operation=operation,
        engine="e1",
        kind="pause",
        exclusive=True,
        state="succeeded",
        done=True,
        sequence=3,
        principal="ada",
        key=f"k-{operation}",
        deadline=1000.0,
        end="digest",
    )


RIGHT: list[Entry] = [
    Begun(seed=7),
    EngineLife(engine="e1", instance="life-1"),
    # Somebody who listens to everything from the beginning.
    Opened(reader="all", connection="all-1"),
    Connected(connection="all-1", status=200),
    Said(connection="all-1", type="snapshot", position=0),
    *ordered_by("c1", "a"),
    told("all-1", 1, "a", 1),
    Opened(reader="of-a", connection="of-a-1", operation="a"),
    Connected(connection="of-a-1", status=200),
    told("of-a-1", 1, "a", 1),
    *done_at_engine("a"),
    Struck(process="gateway", what="killed", point="accept.committed"),
    Closed(connection="all-1", how="broken"),
    Closed(connection="of-a-1", how="broken"),
    Looked(call="l1", operation="a"),
    Saw(call="l1", operation="a", state="succeeded", end="digest"),
    *ordered_by("c2", "b"),
    *done_at_engine("b"),
    Opened(reader="of-a", connection="of-a-2", operation="a", after=1),
    Connected(connection="of-a-2", status=200),
    told("of-a-2", 2, "a", 2),
    told("of-a-2", 4, "a", 3),
    Closed(connection="of-a-2", how="ended"),
    Opened(reader="of-a", connection="of-a-3", operation="a", after=4),
    Connected(connection="of-a-3", status=204),
    Closed(connection="of-a-3", how="ended"),
    Opened(reader="all", connection="all-2", after=1),
    Connected(connection="all-2", status=200),
    *(told("all-2", *event) for event in EVENTS[1:]),
    Said(connection="all-2", type="goodbye"),
    Closed(connection="all-2", how="ended"),
    stored(1, "a"),
    stored(2, "b"),
    *(
        LedgerEvent(
            position=position,
            operation=operation,
            engine="e1",
            sequence=sequence,
            type=TYPES[sequence],
            terminal=sequence == 3,
        )
        for position, operation, sequence in EVENTS
    ),
    LedgerRead(),
]

Wrong = Callable[[list[Entry]], list[Entry]]


def without(wanted: Entry) -> Wrong:
    def change(entries: list[Entry]) -> list[Entry]:
        assert wanted in entries
        return [entry for entry in entries if entry != wanted]

    return change


def instead(old: Entry, *new: Entry) -> Wrong:
    def change(entries: list[Entry]) -> list[Entry]:
        at = entries.index(old)
        return [*entries[:at], *new, *entries[at + 1 :]]

    return change


def behind(entry: Entry, *new: Entry) -> Wrong:
    return instead(entry, entry, *new)


def with_stored(operation: str, **changes: Any) -> Wrong:
    old = stored({"a": 1, "b": 2}[operation], operation)
    return instead(old, replace(old, **changes))


def both(first: Wrong, second: Wrong) -> Wrong:
    return lambda entries: second(first(entries))


def with_event(at: int, /, **changes: Any) -> Wrong:
    def change(entries: list[Entry]) -> list[Entry]:
        return [
            replace(entry, **changes)
            if isinstance(entry, LedgerEvent) and entry.position == at
            else entry
            for entry in entries
        ]

    return change


ANSWER = Answered(call="c1-again", status=202, operation="a", state="accepted")
BEGUN_A = Carried(engine="e1", key="a", phase="begun")
DONE_A = Carried(engine="e1", key="a", phase="done")
COMPLETED_A = Told(engine="e1", key="a", type="completed")
COMPLETED_B = Told(engine="e1", key="b", type="completed")
LAST_OF_A = told("of-a-2", 4, "a", 3)
LAST_OF_ALL = told("all-2", 8, "b", 3)
RETURN = Opened(reader="all", connection="all-2", after=1)
CONNECTED = Connected(connection="all-2", status=200)

WRONG: list[tuple[str, str, Wrong]] = [
    ("acknowledged-not-lost", "an operation", without(stored(1, "a"))),
    ("acknowledged-not-lost", "another order", with_stored("a", key="k-c")),
    ("acknowledged-not-lost", "an event", with_event(2, position=3)),
    ("acknowledged-not-lost", "an event as another", with_event(2, type="warning")),
    (
        "acknowledged-not-lost",
        "what was shown",
        behind(ANSWER, Saw(call="l2", operation="c", state="running")),
    ),
    ("every-operation-ends", "one is open", with_stored("b", state="running", done=False)),
    ("done-once-at-the-engine", "twice", behind(DONE_A, BEGUN_A, DONE_A)),
    ("done-once-at-the-engine", "for nobody", behind(DONE_A, replace(BEGUN_A, key="c"))),
    ("done-once-at-the-engine", "elsewhere", behind(DONE_A, replace(BEGUN_A, engine="e2"))),
    ("done-once-at-the-engine", "a success that was none", without(COMPLETED_A)),
    ("done-once-at-the-engine", "said to be cancelled", with_stored("a", state="cancelled")),
    (
        "done-once-at-the-engine",
        "said to have no effect",
        with_stored("a", state="failed", effect="none"),
    ),
    (
        "key-admitted-once",
        "two operations for a key",
        instead(ANSWER, ANSWER, replace(ANSWER, operation="b")),
    ),
    ("key-admitted-once", "two rows for a key", with_stored("b", key="k-a")),
    (
        "terminal-never-changes",
        "another end",
        with_stored("a", state="failed", end="other"),
    ),
    ("terminal-never-changes", "another end's details", with_stored("a", end="other")),
    (
        "terminal-never-changes",
        "open again",
        behind(
            Saw(call="l1", operation="a", state="succeeded", end="digest"),
            Looked(call="l2", operation="a"),
            Saw(call="l2", operation="a", state="running"),
        ),
    ),
    (
        "terminal-never-changes",
        "open in the ledger",
        with_stored("a", state="running", done=False),
    ),
    ("terminal-once", "two ends in the ledger", with_event(2, terminal=True)),
    ("terminal-once", "no end in the ledger", with_event(4, terminal=False)),
    (
        "terminal-once",
        "two ends in a stream",
        behind(LAST_OF_A, replace(LAST_OF_A, position=5, sequence=4)),
    ),
    (
        "ordered",
        "positions",
        both(
            without(told("all-2", 5, "b", 1)),
            behind(told("all-2", 7, "b", 2), told("all-2", 5, "b", 1)),
        ),
    ),
    ("ordered", "numbers", behind(told("all-2", 7, "b", 2), told("all-2", 7, "b", 1))),
    ("ordered", "in the ledger", with_event(5, sequence=3)),
    ("unique", "over connections", behind(CONNECTED, told("all-2", 1, "a", 1))),
    (
        "unique",
        "another event at a position",
        instead(told("of-a-1", 1, "a", 1), told("of-a-1", 1, "a", 2)),
    ),
    ("gap-free", "in the middle", without(told("of-a-2", 2, "a", 2))),
    ("gap-free", "at the beginning", without(told("all-2", 5, "b", 1))),
    (
        "gap-free",
        "over before its end",
        both(
            both(without(LAST_OF_A), without(Connected(connection="of-a-3", status=204))),
            both(
                without(Opened(reader="of-a", connection="of-a-3", operation="a", after=4)),
                without(Closed(connection="of-a-3", how="ended")),
            ),
        ),
    ),
    ("resumable", "an event missed", without(told("all-2", 2, "a", 2))),
    (
        "resumable",
        "told to begin anew",
        behind(CONNECTED, Said(connection="all-2", type="reset")),
    ),
    ("resumable", "the reader's own fault", instead(RETURN, replace(RETURN, after=2))),
    (
        "resumable",
        "nothing more, it is said",
        both(
            without(told("of-a-2", 2, "a", 2)),
            instead(LAST_OF_A, Closed(connection="of-a-2", how="ended")),
        ),
    ),
    (
        "nothing-behind-a-delivered-position",
        "a whole operation later",
        without(told("all-1", 1, "a", 1)),
    ),
    (
        "nothing-behind-a-delivered-position",
        "one event",
        without(told("all-2", 4, "a", 3)),
    ),
    (
        "one-exclusive-at-a-time",
        "one on top of the other",
        behind(BEGUN_A, Arrived(engine="e1", key="b", kind="pause")),
    ),
    (
        "nothing-after-its-deadline",
        "arrived too late",
        with_stored("b", deadline=10.0),
    ),
    (
        "ledger-order-is-engine-order",
        "the other way round",
        both(with_event(2, position=9), with_event(7, position=3)),
    ),
    ("ledger-order-is-engine-order", "never dispatched", with_event(2, type="warning")),
]


def of(entries: list[Entry]) -> History:
    return history(*entries)


def test_a_right_history_keeps_them_all() -> None:
    assert broken(of(RIGHT)) == []


@pytest.mark.parametrize(("name", "change"), [(n, w) for n, _, w in WRONG], ids=[
    f"{name}: {how}" for name, how, _ in WRONG
])  # fmt: skip
def test_a_wrong_history_is_found_out(name: str, change: Wrong) -> None:
    assert broken(of(change(RIGHT)), [name])


def test_each_guarantee_is_shown_a_wrong_history() -> None:
    assert {name for name, _, _ in WRONG} == set(CHECKS)


def test_a_restart_of_the_engine_ends_what_ran_there() -> None:
    """Its end is unknown, but it is at work no more; another life is no second carrying out."""
    entries: list[Entry] = [
        Begun(seed=0),
        EngineLife(engine="e1", instance="life-1"),
        Arrived(engine="e1", key="a", kind="pause"),
        Carried(engine="e1", key="a", phase="begun"),
        EngineLife(engine="e1", instance="life-2"),
        Arrived(engine="e1", key="b", kind="pause"),
        Carried(engine="e1", key="b", phase="begun"),
        replace(stored(1, "a"), state="failed", effect="unknown"),
        replace(stored(2, "b"), state="failed", effect="unknown"),
        LedgerRead(),
    ]
    names = ["one-exclusive-at-a-time", "done-once-at-the-engine"]
    assert broken(of(entries), names) == []


def test_what_was_refused_or_settled_is_not_at_work() -> None:
    entries: list[Entry] = [
        Begun(seed=0),
        Arrived(engine="e1", key="a", kind="pause"),
        Told(engine="e1", key="a", type="refused"),
        Arrived(engine="e1", key="b", kind="pause"),
        Arrived(engine="e1", key="c", kind="pause"),
        stored(1, "a"),
        replace(stored(2, "b"), settled=True),
        stored(3, "c"),
        LedgerRead(),
    ]
    assert broken(of(entries), ["one-exclusive-at-a-time"]) == []


def test_a_reset_begins_a_reader_anew() -> None:
    """What is in the snapshot need not be heard, and may be."""
    entries: list[Entry] = [
        Begun(seed=0),
        Opened(reader="all", connection="1", after=90),
        Connected(connection="1", status=200),
        Said(connection="1", type="reset"),
        Said(connection="1", type="snapshot", position=2, known={"a": 2}),
        *(told("1", *event) for event in EVENTS[2:]),
        Closed(connection="1", how="left"),
        *(entry for entry in RIGHT if isinstance(entry, LedgerEvent)),
        LedgerRead(),
    ]
    names = ["ordered", "unique", "gap-free", "nothing-behind-a-delivered-position"]
    assert broken(of(entries), names) == []
    missed = [each for each in entries if each != told("1", 5, "b", 1)]
    assert {line.partition(":")[0] for line in broken(of(missed), names)} == set(names[2:])


def test_a_history_without_its_end_proves_nothing() -> None:
    with pytest.raises(ValueError, match="was not read"):
        broken(of(RIGHT[:-1]))


def test_a_history_lies_in_a_file_that_can_be_checked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.jsonl"
    recorder = Recorder.begin(path, 7, database="sqlite")
    beside = Recorder(path)  # as another process has it
    for number, entry in enumerate(RIGHT[1:]):
        (recorder, beside)[number % 2].write(entry)
    assert [line.entry for line in recorder.read().lines][1:] == RIGHT[1:]
    assert read(path).begun == Begun(seed=7, about={"database": "sqlite"})
    recorder.write(replace(stored(3, "c"), state="running", done=False))
    beside.close()
    recorder.close()
    assert main([str(path), "key-admitted-once"]) == 0
    assert main([str(path)]) == 1
    said = capsys.readouterr().out
    assert "seed 7" in said
    assert "every-operation-ends: operation c is still running" in said
    with pytest.raises(AssertionError, match=r"seed 7(.|\n)*operation c is still running"):
        hold(path)


@pytest.mark.parametrize(
    "line", ["{", '{"at": 1, "entry": "Guess"}', '{"at": 1, "entry": "Closed", "connection": "x"}']
)
def test_a_line_that_is_no_entry_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "history.jsonl"
    Recorder.begin(path, 1).close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read(path)
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1"):
        read(path)


def test_a_history_says_how_it_began() -> None:
    with pytest.raises(ValueError, match="how it began"):
        history(LedgerRead())
