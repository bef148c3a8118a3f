"""The OpenAPI document: up to date and whole. That the gateway answers by it is tried in e2e."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from app.http.route import EdgeRoute
from app.main import create_app
from app.settings import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app(Settings())


def test_the_exported_document_is_the_one_that_is_served() -> None:
    script = ROOT / "scripts" / "export-openapi"
    checked = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_every_route_is_described(app: FastAPI) -> None:
    document = app.openapi()
    assert document["openapi"].startswith("3.1")
    names = set()
    for route in app.routes:
        assert isinstance(route, EdgeRoute)
        if not route.include_in_schema:
            continue
        for method in route.methods or ():
            described = document["paths"][route.path_format][method.lower()]
            names.add(described["operationId"])
            assert described["operationId"] == route.name
            assert described["description"]
            if "security" in described:
                problem = described["responses"]["401"]["content"]
                assert list(problem) == ["application/problem+json"]
    assert len(names) == sum(
        len(r.methods or ()) for r in app.routes if isinstance(r, EdgeRoute) and r.include_in_schema
    )
    assert "HTTPValidationError" not in json.dumps(document)


def test_nothing_of_a_body_is_open_ended(app: FastAPI) -> None:
    """What is not named in a body's schema is refused, and every text in it has a limit."""
    schemas = app.openapi()["components"]["schemas"]
    bodies = {name: schema for name, schema in schemas.items() if name.endswith("Body")}
    assert len(bodies) == 46
    for name, schema in bodies.items():
        assert schema["additionalProperties"] is False, name
        for text in texts(schema["properties"]):
            bounded = {"maxLength", "pattern", "enum", "const", "format"} & set(text)
            assert bounded, (name, text)


def texts(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if node.get("type") == "string":
            yield node
        for child in node.values():
            yield from texts(child)
    elif isinstance(node, list):
        for child in node:
            yield from texts(child)
