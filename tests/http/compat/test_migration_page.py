"""docs/migration.md: the endpoints, routes and scopes in its tables are those that there are, and
no endpoint that orders something is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.http.compat.rows import Table
from app.http.compat.sglang.table import SGLANG
from app.http.compat.vllm.table import VLLM

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "migration.md"
PATHS = json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"]
ROUTE = re.compile(r"(GET|POST|DELETE) `(?:…|/v1/engines/\{engine\})([^`]*)`")
SCOPE = re.compile(r"admin:[\w.]+")
LAYERS = {"vLLM": VLLM, "SGLang": SGLANG}


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table below it, without its head."""
    part = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]


ALL = [row for name in (*LAYERS, "TensorRT-LLM and Dynamo") for row in rows_of(name)]


def endpoints(table: Table, *, refused: bool) -> set[str]:
    return {
        f"{method} {row.path}"
        for row in table.rows
        for method in row.methods
        if row.act.__qualname__.startswith("refuse.") is refused
    }


def named(cell: str) -> list[str]:
    return re.findall(r"`((?:GET|POST) /[\w/]+)`", cell)


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_the_layers_endpoints_are_there_and_none_that_orders_is_left_out(name: str) -> None:
    there = endpoints(LAYERS[name], refused=False)
    said = {one for row in rows_of(name) for one in named(row[3])}
    assert said - there == set()
    orders = {one for one in there if one.startswith("POST ")}
    assert orders - said == set()


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_the_scopes_of_the_layers_endpoints_are_said_too(name: str) -> None:
    taken = {
        f"{method} {row.path}": set(map(str, row.scopes))
        for row in LAYERS[name].rows
        for method in row.methods
    }
    lacks = [
        f"{one}: {taken[one] - said}"
        for row in rows_of(name)
        if (said := set(SCOPE.findall(row[2]))) and named(row[3])
        for one in named(row[3])
        if not taken[one] <= said
    ]
    assert lacks == []


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_what_it_calls_refused_is_refused(name: str) -> None:
    refused = {one.partition(" ")[2] for one in endpoints(LAYERS[name], refused=True)}
    for row in rows_of(name):
        if row[3] == "403":
            paths = re.findall(r"`(?:POST )?(/[\w/]+)(?:/…)?`", row[0])
            assert paths
            assert {path for path in paths if not any(path in one for one in refused)} == set()


def test_each_order_is_a_route_and_takes_the_scope_that_is_said() -> None:
    wrong, seen = [], 0
    for row in ALL:
        for method, path in ROUTE.findall(row[1]):
            seen += 1
            route = PATHS.get(f"/v1/engines/{{engine}}{path}", {}).get(method.lower())
            if route is None:
                wrong.append(f"{method} …{path}: no such route")
            elif not set(route["security"][0]["bearer"]) <= set(SCOPE.findall(row[2])):
                wrong.append(f"{method} …{path}: takes {route['security']}, not {row[2]}")
    assert wrong == []
    assert seen > 40
