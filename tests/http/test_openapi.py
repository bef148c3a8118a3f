"""The OpenAPI document: up to date, whole, and true of the running gateway."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance
from schemathesis.specs.openapi.schemas import OpenApiSchema

from app.http.route import EdgeRoute
from app.main import create_app
from app.settings import Settings
from tests.http.gateway import gateway

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
    assert len(bodies) == 43
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


EXAMPLES = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 12

# Not all that fits the schema can be taken: a page token must be one that was given out. And
# 501, 503 are answers here, where they are declared; 500 never is.
EXCLUDED = [positive_data_acceptance, not_a_server_error]


@dataclass(frozen=True)
class Live:
    url: str
    headers: dict[str, str]


@contextmanager
def live_gateway(data_dir: Path) -> Iterator[Live]:
    """A gateway in a thread of its own, for a client that blocks."""
    ready: list[Live] = []
    up = threading.Event()
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        done = asyncio.Event()
        stop.append((asyncio.get_running_loop(), done))
        async with gateway(data_dir) as gate:
            ready.append(Live(gate.url, gate.auth()))
            up.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        assert up.wait(30)
        yield ready[0]
    finally:
        loop, done = stop[0]
        loop.call_soon_threadsafe(done.set)
        thread.join(30)


@pytest.mark.filterwarnings("ignore")
def test_the_gateway_answers_as_the_document_says(tmp_path: Path) -> None:
    """Generated requests, good and bad, to every operation: no 5xx of ours, and every answer as
    it is declared."""
    load_all_checks()
    with live_gateway(tmp_path / "data") as live:
        # The class is imported above, not here: Python before 3.11.5 can fail to compile a module
        # while the gateway's thread compiles one too.
        schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
        assert isinstance(schema, OpenApiSchema)
        for result in schema.get_all_operations():
            assert isinstance(result, Ok)
            operation = result.ok()

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def probe(case: Any) -> None:
                # Streams do not end; as pages they are the same events.
                sent = {**live.headers, "Accept": "application/json, text/html, text/plain"}
                response = case.call(base_url=live.url, headers=sent, timeout=20)
                assert response.status_code != 500
                case.validate_response(response, excluded_checks=EXCLUDED)

            probe()
