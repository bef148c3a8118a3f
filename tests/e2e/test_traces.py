"""Spans as a collector gets them from processes that a user would start."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.doubles.otlp import Collector, Told, collecting
from tests.e2e.processes import POLL_S, START_S, environment
from tests.e2e.stack import ENGINE, register, stack

pytestmark = pytest.mark.anyio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
PAUSE = "openengine.v1.OpenEngineAdmin/Pause"


def chain(spans: list[Told], name: str, service: str) -> list[tuple[str, str]]:
    """Services and names from that span up to the one that has no parent here."""
    by_id = {span.id: span for span in spans}
    (at,) = [span for span in spans if (span.name, span.service) == (name, service)]
    found = [(at.service, at.name)]
    while at.parent in by_id:
        at = by_id[at.parent]
        found.append((at.service, at.name))
    assert at.parent == CALLER
    return found


def told(collector: Collector, *names: str) -> list[Told]:
    until = time.monotonic() + START_S
    while not {span.name for span in collector.spans()}.issuperset(names):
        assert time.monotonic() < until, [span.name for span in collector.spans()]
        time.sleep(POLL_S)
    return collector.spans()


async def test_one_trace_joins_request_ledger_call_and_engine(tmp_path: Path) -> None:
    with (
        collecting() as collector,
        stack(
            tmp_path,
            first=f'traces = "{collector.endpoint}"\n',
            engine_arguments=(f"--traces={collector.endpoint}",),
        ) as running,
    ):
        bridge = running.bridge
        async with bridge.gateway.client:
            await register(bridge)
            given = await bridge.gateway.client.post(
                f"/v1/engines/{ENGINE}/pause",
                json={"mode": "drain", "reason": "s3cret reason"},
                headers={
                    "Idempotency-Key": "s3cret-key",
                    "Prefer": "wait=60",
                    "traceparent": f"00-{TRACE}-{CALLER}-01",
                },
            )
        assert given.status_code == 200, given.text
        assert given.json()["trace_id"] == TRACE
        tokens = running.ready["tokens"].values()
        running.gateway.stop()
        running.engine.stop()
        spans = told(collector, "drive pause", "carry out pause")
    ours = [span for span in spans if span.trace == TRACE]
    gateway, engine = "chadburn-gateway", "chadburn-engine"
    assert chain(ours, "carry out pause", engine) == [
        (engine, "carry out pause"),
        (engine, PAUSE),
        (gateway, PAUSE),
        (gateway, "drive pause"),
        (gateway, "take on pause"),
        (gateway, "POST /v1/engines/{engine}/pause"),
    ]
    (driven,) = [span for span in ours if span.name == "drive pause"]
    assert driven.attributes["chadburn.operation"] == given.json()["id"]
    assert driven.attributes["chadburn.operation.state"] == "succeeded"
    assert not [span for span in ours if span.failed]
    # What nobody asked for begins no trace, neither here nor at the engine.
    assert {span.name for span in spans if not span.parent} == {
        "POST /v1/engines",
        "GET /v1/engines/{engine}",
    }
    sent = b"".join(collector.raw)
    for secret in ("s3cret", str(tmp_path), *tokens):
        assert secret.encode() not in sent


def test_without_the_setting_nothing_of_it_is_imported(tmp_path: Path) -> None:
    """Whatever the variables of OpenTelemetry say, in the process of a gateway that serves."""
    with collecting() as collector:
        script = (
            "import asyncio, sys\n"
            "from app.main import create_app\n"
            "from app.settings import IssuerSettings, Settings\n"
            "async def main():\n"
            f"    app = create_app(Settings(data_dir={str(tmp_path / 'data')!r}, audience='a',\n"
            "        issuers=(IssuerSettings(issuer='http://127.0.0.1:9'),)))\n"
            "    async with app.router.lifespan_context(app):\n"
            "        import app.enginekit.server, app.reference_engine.serving\n"
            "        of = ('opentelemetry.sdk', 'opentelemetry.exporter', 'opentelemetry.proto')\n"
            "        of += ('app.observability.otlp',)\n"
            "        print([name for name in sys.modules if name.startswith(of)])\n"
            "asyncio.run(main())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment(OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
        assert collector.raw == []
