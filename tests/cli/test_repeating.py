"""What is read before an order is decided, and how to give the same order again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.scripted import Answer, Gateway, operation, problem

DRAINING = {
    "id": "e",
    "revision": 7,
    "facts": {"admission": "draining", "pause": {"mode": "drain", "epoch": 0, "by": "op-7"}},
    "running_operation": "op-7",
}
CHANGED = {
    "id": "e",
    "revision": 7,
    "facts": {
        "pause": {"mode": "keep", "epoch": 3, "by": "op-0"},
        "released": ["kv_cache", "weights"],
        "release_epoch": 2,
    },
}
LOST = problem(503, title="Unavailable", reason="LEDGER_UNAVAILABLE")


@pytest.mark.parametrize(
    ("facts", "said"),
    [(DRAINING["facts"], "still drains"), ({"pause": None}, "is not paused")],
)
def test_a_drain_that_goes_on_cannot_be_lifted(
    at: Run, gateway: Gateway, facts: Any, said: str
) -> None:
    """Also where the engine was last read just before it began."""
    gateway.then(Answer(200, DRAINING | {"facts": facts}))
    ran = at("resume", "e")
    assert (ran.code, len(gateway.seen)) == (6, 1)
    assert f"engine e {said}, as far as is known; an order runs" in ran.err
    assert "chadburn ops watch op-7" in ran.err


def test_a_drain_that_goes_on_has_no_epoch_to_show(at: Run, gateway: Gateway) -> None:
    shown = DRAINING | {"dialect": "openengine", "health": {"state": "serving"}}
    gateway.then(Answer(200, {"items": [shown], "next_page_token": None}))
    (row,) = at("engines", "list").out.splitlines()[1:]
    assert row.split() == ["e", "openengine", "serving", "draining", "drain", "r7", "op-7", "-"]


@pytest.mark.parametrize(
    ("arguments", "again"),
    [
        (("resume", "e"), "--pause-epoch 3 --if-revision 7"),
        (("resume", "e", "--if-revision", "6"), "--pause-epoch 3"),
        (("resume", "e", "--pause-epoch", "3"), ""),
        (
            ("restore", "e"),
            "--resource kv_cache --resource weights --release-epoch 2 --if-revision 7",
        ),
        (("restore", "e", "--resource", "weights"), "--release-epoch 2 --if-revision 7"),
        (
            ("restore", "e", "--release-epoch", "2"),
            "--resource kv_cache --resource weights --if-revision 7",
        ),
    ],
)
def test_what_was_read_is_named_when_the_answer_is_lost(
    at: Run, gateway: Gateway, arguments: tuple[str, ...], again: str
) -> None:
    """Read anew, it could be another order, or none: the first one may have been carried out."""
    if again:
        gateway.then(Answer(200, CHANGED))
    gateway.then(LOST)
    ran = at(*arguments, "--key", "k-9")
    assert ran.code == 7
    assert f"so repeat it with {f'--key k-9 {again}'.rstrip()}\n" in ran.err
    gateway.answers = [Answer(202, operation())]
    assert at(*arguments, "--key", "k-9", *again.split()).code == 0
    first, *_, second = [seen for seen in gateway.seen if seen.method == "POST"]
    assert first.body == second.body
    assert first.headers.get("if-match") == second.headers.get("if-match")


def test_a_field_is_named_in_place_of_the_same_words_without_it(at: Run, gateway: Gateway) -> None:
    faults: list[dict[str, Any]] = [{"pointer": "/mode", "detail": "no such mode"}]
    gateway.then(problem(422, title="Invalid argument", detail="no such mode", errors=faults))
    assert at("pause", "e", "--mode", "keep").err == (
        "chadburn: Invalid argument; /mode: no such mode\n"
    )


def test_what_is_not_known_is_left_out(at: Run, gateway: Gateway) -> None:
    result = {"changed": True, "all": None}
    gateway.then(Answer(200, operation("succeeded", result=result)))
    assert "succeeded  changed=true  r8  op-1" in at("ops", "get", "op-1").out
