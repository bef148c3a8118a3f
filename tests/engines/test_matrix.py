"""The page of engines says what the code offers and the tests try, and no more."""

from __future__ import annotations

import ast

from app.domain.kinds import OperationKind as Kind
from tests.engines.evidence import PROVING, Means, runs, tried
from tests.engines.offers import ROOT, ways
from tests.engines.orders import ordered
from tests.engines.page import document

from app.conformance.catalogue import catalogue  # isort: skip


def test_the_page_is_what_it_would_be() -> None:
    page = ROOT / "docs" / "engines.md"
    assert page.read_text() == document(), "run scripts/gen-engine-matrix"


def test_every_sidecar_is_there() -> None:
    keys = {way.key for way in ways()}
    for folder in (ROOT / "app" / "sidecars").iterdir():
        if (folder / "dialect.py").exists():
            assert f"sidecars/{folder.name}" in keys, folder.name


def test_what_a_test_orders() -> None:
    def of(source: str) -> set[Kind]:
        return set(ordered(ast.parse(source)))

    assert of("await client.completed(client.pause('abort'))") == {Kind.PAUSE}
    assert of("order = client.update('v2'); await client.completed(order)") == {Kind.UPDATE_WEIGHTS}
    assert of("await bridge.does(ENGINE, 'release-resources', {})") == {Kind.RELEASE_RESOURCES}
    assert of("await client.control.LoadLora(load('a'))") == {Kind.LOAD_LORA}
    # What has to fail is none of it.
    assert not of("await refused(client.control.LoadLora(load('a')))")
    assert not of("await client.failed(client.pause('abort'))")
    assert not of("await client.order(client.pause('abort'))")


def test_runs_are_of_cases_that_there_are() -> None:
    cases = {case.id for case in catalogue()}
    assert set(PROVING) <= cases
    for run in runs().values():
        assert run.cases <= cases, run.name


def test_what_was_never_run_is_not_said_to_be() -> None:
    for way in ways():
        best = max(tried(way, {}).values(), default=Means.NOTHING)
        if way.key != "reference_engine":
            assert best <= Means.REPLAY
