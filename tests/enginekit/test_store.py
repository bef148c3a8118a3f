"""The store by itself: what goes in comes out, and what must never be wrong is refused."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.kinds import FailureEffect, OperationKind, OperationState, Verification
from app.domain.operation import (
    Actor,
    Operation,
    OperationError,
    OperationWarning,
    Progress,
)
from app.domain.ranks import RankReport, RankState
from app.domain.transitions import (
    Advanced,
    Completed,
    Fact,
    Progressed,
    Started,
    accepted_event,
    advance,
)
from app.enginekit.records import (
    EVERYTHING,
    NO_CHANGE,
    REVISION,
    Change,
    Counters,
    Record,
    operation_from,
    operation_text,
)
from app.enginekit.store import FILE_NAME, OperationStore, StoreFull, StoreInUse, Superseded

NOW = datetime(2026, 3, 1, tzinfo=UTC)

texts = st.text(max_size=8)
times = st.none() | st.datetimes(timezones=st.just(UTC))
operations = st.builds(
    Operation,
    id=texts,
    engine_id=texts,
    kind=st.sampled_from(OperationKind),
    state=st.sampled_from(OperationState),
    request=st.dictionaries(texts, st.integers() | texts | st.booleans() | st.none(), max_size=3),
    actor=st.builds(Actor, texts, texts, texts),
    created_at=st.datetimes(timezones=st.just(UTC)),
    sequence=st.integers(1, 1000),
    engine_instance_id=st.none() | texts,
    idempotency_key=st.none() | texts,
    expected_revision=st.none() | st.integers(0),
    revision=st.none() | st.integers(0),
    deadline_at=times,
    started_at=times,
    ended_at=times,
    cancel_requested=st.booleans(),
    result=st.none() | st.dictionaries(texts, st.integers(), max_size=3),
    error=st.none()
    | st.builds(
        OperationError,
        code=texts,
        reason=texts,
        message=texts,
        retryable=st.booleans(),
        ranks=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        effect=st.sampled_from(FailureEffect),
    ),
    verification=st.none() | st.sampled_from(Verification),
    warnings=st.lists(st.builds(OperationWarning, texts, texts), max_size=2).map(tuple),
    ranks=st.lists(
        st.builds(RankReport, st.integers(0, 9), st.sampled_from(RankState), texts), max_size=2
    ).map(tuple),
    progress=st.none() | st.builds(Progress, texts, st.integers(0), st.integers(0), texts),
)


@given(operations)
def test_an_operation_comes_back_as_it_went_in(operation: Operation) -> None:
    assert operation_from(operation_text(operation)) == operation


def make_record(name: str, kind: OperationKind = OperationKind.PAUSE) -> Record:
    operation = Operation(
        id=name,
        engine_id="engine",
        kind=kind,
        state=OperationState.ACCEPTED,
        request={},
        actor=Actor("", "", ""),
        created_at=NOW,
        idempotency_key=f"key of {name}",
    )
    return Record(operation=operation, fingerprint="f", accepted_revision=1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OperationStore]:
    store = OperationStore.open(tmp_path, new_identity="first")
    yield store
    store.close()


def accept(store: OperationStore, record: Record, keep: int = 100, at: datetime = NOW) -> None:
    event = accepted_event(record.operation)
    store.accept(record, event, keep=keep, evictable_before=at - timedelta(hours=24))


def step(store: OperationStore, operation: Operation, fact: Fact, counters: Counters) -> Operation:
    advanced = advance(operation, fact, NOW)
    assert isinstance(advanced, Advanced)
    store.record(operation, advanced, counters)
    return advanced.operation


def test_a_store_keeps_its_identity(tmp_path: Path) -> None:
    for wanted in ("first", "second"):
        store = OperationStore.open(tmp_path, new_identity=wanted)
        assert store.identity == "first"
        store.close()


def test_a_store_is_opened_once(store: OperationStore, tmp_path: Path) -> None:
    with pytest.raises(StoreInUse):
        OperationStore.open(tmp_path, new_identity="second")


def test_a_write_is_durable_and_ordered(tmp_path: Path) -> None:
    store = OperationStore.open(tmp_path, new_identity="x")
    counters = store.begin_life("life", NOW)
    assert counters == Counters(1, 1, 1)
    record = make_record("a")
    accept(store, record)
    running = step(store, record.operation, Started(), counters)
    running = step(store, running, Progressed(progress=Progress("half")), counters)
    higher = counters.after(REVISION)
    step(store, running, Completed(result={"changed": True}, revision=2), higher)
    store.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    db.close()
    store = OperationStore.open(tmp_path, new_identity="x")
    found = store.by_key("key of a")
    assert found == store.by_id("a")
    assert found is not None
    assert found.operation.state is OperationState.SUCCEEDED
    assert [event.type for event in store.events("a")] == ["accepted", "progress", "completed"]
    assert store.begin_life("other", NOW) == higher.after(EVERYTHING)
    assert store.by_id("none") is None
    store.close()


def test_who_writes_on_an_old_picture_is_superseded(store: OperationStore) -> None:
    counters = store.begin_life("life", NOW)
    record = make_record("a")
    accept(store, record)
    running = step(store, record.operation, Started(), counters)
    step(store, running, Progressed(progress=Progress("x")), counters)
    with pytest.raises(Superseded):
        step(store, running, Progressed(progress=Progress("y")), counters)
    assert len(store.events("a")) == 2


def test_counters_never_go_back(store: OperationStore) -> None:
    counters = store.begin_life("life", NOW)
    for lower in (
        replace(counters, revision=0),
        replace(counters, pause_epoch=0),
        replace(counters, release_epoch=0),
    ):
        with pytest.raises(sqlite3.IntegrityError, match="never go back"):
            store.set_counters(lower)


def test_one_exclusive_operation_is_open_at_a_time(store: OperationStore) -> None:
    store.begin_life("life", NOW)
    accept(store, make_record("a"))
    accept(store, make_record("beside", OperationKind.PROFILE))
    with pytest.raises(sqlite3.IntegrityError):
        accept(store, make_record("b"))
    assert store.events("b") == ()


def test_a_key_is_taken_once(store: OperationStore) -> None:
    store.begin_life("life", NOW)
    accept(store, make_record("a", OperationKind.PROFILE))
    twin = make_record("b", OperationKind.PROFILE)
    twin = twin.at(replace(twin.operation, idempotency_key="key of a"))
    with pytest.raises(sqlite3.IntegrityError):
        accept(store, twin)


def test_an_end_is_final_in_the_file_too(store: OperationStore) -> None:
    counters = store.begin_life("life", NOW)
    record = make_record("a")
    accept(store, record)
    running = step(store, record.operation, Started(), counters)
    done = step(store, running, Completed(result={"changed": False}), counters)
    forged = advance(running, Completed(result={"changed": True}), NOW)
    assert isinstance(forged, Advanced)
    with pytest.raises(sqlite3.IntegrityError, match="never changes"):
        store.record(done, forged, counters)


def test_only_what_has_long_ended_makes_room(store: OperationStore) -> None:
    counters = store.begin_life("life", NOW)
    first = make_record("a")
    accept(store, first)
    step(
        store,
        step(store, first.operation, Started(), counters),
        Completed(result={"changed": True}),
        counters,
    )
    accept(store, make_record("open"))
    late = NOW + timedelta(hours=24, seconds=1)
    with pytest.raises(StoreFull):
        accept(store, make_record("c", OperationKind.PROFILE), keep=2, at=NOW)
    accept(store, make_record("c", OperationKind.PROFILE), keep=2, at=late)
    assert store.by_id("a") is None
    assert store.events("a") == ()
    assert store.by_id("open") is not None
    with pytest.raises(StoreFull):
        accept(store, make_record("d", OperationKind.PROFILE), keep=2, at=late)


def test_changes() -> None:
    assert not NO_CHANGE
    assert Counters(1, 2, 3).after(Change(pause_epoch=True)) == Counters(1, 3, 3)
