"""The promises about operations and orders, each a pure function over a recorded history.

It yields a sentence for each thing that breaks the promise; nothing: the history keeps it. What was
promised about streams is in `stream_guarantees`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from tests.robustness.history import (
    Answered,
    Arrived,
    Asked,
    Carried,
    Delivered,
    EngineLife,
    History,
    LedgerEvent,
    LedgerOperation,
    Looked,
    Saw,
    Told,
)

Check = Callable[[History], Iterator[str]]
TERMINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})
# Engines are called for these without a key, and keep no record that could be told of.
_UNRECORDED = frozenset({"abort_requests", "load_lora", "unload_lora", "profile"})


def operations_of(history: History) -> dict[str, LedgerOperation]:
    return {each.operation: each for each in history.all(LedgerOperation)}


def acknowledged_not_lost(history: History) -> Iterator[str]:
    """Every operation that a client was answered with, or told of, is in the ledger as it was."""
    stored = operations_of(history)
    events = {each.position: each for each in history.all(LedgerEvent)}
    asked = {each.call: each for each in history.all(Asked)}
    for answer in history.all(Answered):
        if answer.operation is None:
            continue
        found, order = stored.get(answer.operation), asked[answer.call]
        if found is None:
            yield f"operation {answer.operation} was acknowledged and is not in the ledger"
        elif (found.engine, found.kind, found.key) != (order.engine, order.kind, order.key):
            yield f"operation {answer.operation} is not the one that was ordered by {order.call}"
    for saw in history.all(Saw):
        if saw.operation not in stored:
            yield f"operation {saw.operation} was shown and is not in the ledger"
    for told in history.all(Delivered):
        kept = events.get(told.position)
        if kept is None:
            yield f"the event at {told.position} was told and is not in the ledger"
        elif (kept.operation, kept.sequence, kept.type) != (
            told.operation,
            told.sequence,
            told.type,
        ):
            yield f"the event at {told.position} was told as another one"


def every_operation_ends(history: History) -> Iterator[str]:
    """Nothing is left lying when faults are over and there was time."""
    for operation in history.all(LedgerOperation):
        if not operation.done:
            yield f"operation {operation.operation} is still {operation.state}"


def done_once_at_the_engine(history: History) -> Iterator[str]:
    """No order is carried out twice, or without an operation; what succeeded was done."""
    stored = operations_of(history)
    begun: dict[tuple[str, str], int] = defaultdict(int)
    done: set[str] = set()
    for carried in history.all(Carried):
        begun[carried.engine, carried.key] += carried.phase == "begun"
        if carried.phase == "done":
            done.add(carried.key)
    for (engine, key), times in begun.items():
        if times > 1:
            yield f"{engine} carried order {key} out {times} times"
        if key not in stored:
            yield f"{engine} carried out {key}, which is no operation of the ledger"
        elif stored[key].engine != engine:
            yield f"{engine} carried out {key}, which is an order to {stored[key].engine}"
    completed = {told.key for told in history.all(Told) if told.type == "completed"}
    for operation in stored.values():
        name = operation.operation
        recorded = operation.kind not in _UNRECORDED and not operation.settled
        if operation.state == "succeeded" and recorded and name not in completed:
            yield f"operation {name} succeeded, and the engine never said so"
        if operation.state == "cancelled" and name in done and not operation.settled:
            yield f"operation {name} was cancelled, and was done"
        if operation.effect == "none" and name in done:
            yield f"operation {name} failed without effect, and was done"


def key_admitted_once(history: History) -> Iterator[str]:
    """A principal's key stands for one operation, in answers and in the ledger."""
    asked = {each.call: each for each in history.all(Asked)}
    admitted: dict[tuple[str, str], set[str]] = defaultdict(set)
    for answer in history.all(Answered):
        if answer.operation is not None:
            order = asked[answer.call]
            admitted[order.principal, order.key].add(answer.operation)
    for operation in history.all(LedgerOperation):
        if operation.key is not None:
            admitted[operation.principal, operation.key].add(operation.operation)
    owners: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for key, operations in admitted.items():
        if len(operations) > 1:
            yield f"key {key[1]} of {key[0]} stands for {len(operations)} operations"
        for name in operations:
            owners[name].add(key)
    for name, keys in owners.items():
        if len(keys) > 1:
            yield f"operation {name} was given for {len(keys)} keys"


def terminal_never_changes(history: History) -> Iterator[str]:
    """Once anybody has seen how an operation ended, everybody sees that, and nothing else."""
    ended: dict[str, str] = {}
    ends: dict[str, str] = {}
    looked: dict[str, bool] = {}  # whether its end was known when the call began
    for line in history.lines:
        match line.entry:
            case Looked(call=call, operation=name):
                looked[call] = name in ended
                continue
            case Saw(call=call, operation=name, state=state, end=end):
                if state not in TERMINAL_STATES and looked.get(call):
                    yield f"operation {name} had ended and was seen {state} afterwards"
            case Answered(operation=str(name), state=str(state)):
                end = None
            case Delivered(operation=name, state=str(state)):
                end = None
            case LedgerOperation(operation=name, state=state, end=end):
                if state not in TERMINAL_STATES and name in ended:
                    yield f"operation {name} was {ended[name]} and is {state} in the ledger"
            case _:
                continue
        if state in TERMINAL_STATES:
            if ended.setdefault(name, state) != state:
                yield f"operation {name} was {ended[name]} and then {state}"
            elif end is not None and ends.setdefault(name, end) != end:
                yield f"the end of operation {name} says something else than before"


def one_exclusive_at_a_time(history: History) -> Iterator[str]:
    """No exclusive order reaches an engine while another one may still be at work there."""
    # A person who settles an operation takes it upon himself that it is over.
    exclusive = {
        name for name, each in operations_of(history).items() if each.exclusive and not each.settled
    }
    open_at: dict[str, set[str]] = defaultdict(set)
    over: set[tuple[str, str]] = set()
    for line in history.lines:
        match line.entry:
            case EngineLife(engine=engine):
                over.update((engine, key) for key in open_at[engine])
                open_at[engine].clear()
            case Arrived(engine=engine, key=key) if key in exclusive:
                # One that has ended may be attached to: it is only told again.
                if (engine, key) not in over:
                    others = open_at[engine] - {key}
                    if others:
                        yield f"{key} reached {engine} while {min(others)} was at work there"
                    open_at[engine].add(key)
            case (
                Carried(engine=engine, key=key, phase="done" | "undone")
                | Told(engine=engine, key=key, type="completed" | "failed" | "cancelled")
            ):
                over.add((engine, key))
                open_at[engine].discard(key)
            case Told(engine=engine, key=key, type="refused"):
                # Not taken on, and may be sent again.
                open_at[engine].discard(key)
            case _:
                pass


def nothing_after_its_deadline(history: History) -> Iterator[str]:
    """An order that an engine does not have yet at its deadline never gets there."""
    stored = operations_of(history)
    arrived: set[str] = set()
    for line in history.lines:
        match line.entry:
            case Arrived(key=key) if key not in arrived and key in stored:
                arrived.add(key)
                deadline = stored[key].deadline
                if deadline is not None and line.at > deadline + history.begun.transit_s:
                    yield f"order {key} arrived {line.at - deadline:.3f} s after its deadline"
            case _:
                pass


def ledger_order_is_engine_order(history: History) -> Iterator[str]:
    """Exclusive orders are begun at the engine in the order in which they were dispatched."""
    stored = operations_of(history)
    dispatched: dict[str, int] = {}
    for event in sorted(history.all(LedgerEvent), key=lambda each: each.position):
        if event.type == "dispatched":
            dispatched.setdefault(event.operation, event.position)
    latest: dict[str, tuple[int, str]] = {}
    seen: set[str] = set()
    for carried in history.all(Carried):
        key = carried.key
        if carried.phase != "begun" or key in seen or key not in stored:
            continue
        seen.add(key)
        if not stored[key].exclusive:
            continue
        position = dispatched.get(key)
        if position is None:
            yield f"{carried.engine} began {key}, which was never dispatched"
            continue
        before = latest.get(carried.engine)
        if before is not None and position < before[0]:
            yield f"{carried.engine} began {before[1]} before {key}, which was dispatched first"
        latest[carried.engine] = max(before or (position, key), (position, key))
