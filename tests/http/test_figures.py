"""What watches a gateway names figures that it tells, and the page names all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.http.gateway import gateway

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
WATCHING = ROOT / "deploy" / "observability"
NAME = re.compile(r"\bchadburn_\w+")
OF_A_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture
async def told(tmp_path: Path) -> set[str]:
    async with gateway(tmp_path) as gate:
        return told_by((await gate.get("/metrics")).text)


def told_by(text: str) -> set[str]:
    """Families by their names, also of those that have no figure yet."""
    named = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    return {name for name in named if not name.endswith("_created")}


def expressions() -> list[str]:
    rules = (WATCHING / "alerts.yml").read_text()
    board: dict[str, Any] = json.loads((WATCHING / "grafana-dashboard.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = [variable.get("definition", "") for variable in board["templating"]["list"]]
    return [*re.findall(r"expr: (.*)", rules), *shown, *asked]


async def test_alerts_and_dashboard_ask_for_what_is_told(told: set[str]) -> None:
    asked = {OF_A_HISTOGRAM.sub("", name) for one in expressions() for name in NAME.findall(one)}
    assert len(asked) > 10
    assert asked - told == set()


async def test_the_page_names_every_figure(told: set[str]) -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    named = set(re.findall(r"^\| `(chadburn_\w+)`", page, re.MULTILINE))
    assert named == told


def test_each_alert_is_tried() -> None:
    rules = re.findall(r"- alert: (\w+)", (WATCHING / "alerts.yml").read_text())
    tried = set(re.findall(r'alertname="(\w+)"', (WATCHING / "alerts.test.yml").read_text()))
    assert set(rules) == tried
