"""What is relied on of Dynamo's own system server."""

from __future__ import annotations

import time

import httpx2

from app.sidecars.answers import Answer
from app.sidecars.dynamo.answers import metrics_of
from tests.dynamo.servers import DynamoServer, asking, serving, tokens_of
from tests.sidecars.dynamo.test_recorded import CALLS, judged


def test_as_recorded(worker: DynamoServer) -> None:
    with httpx2.Client(base_url=worker.url, trust_env=False) as http:
        for call in CALLS:
            judged(call, http.request(call["method"], call["path"], content=call["body"]))


def test_a_callback_goes_on_when_its_caller_is_gone(worker: DynamoServer) -> None:
    before = worker.state()["flushed"]
    try:
        httpx2.post(f"{worker.url}/engine/test/slow", json={}, timeout=0.1)
    except httpx2.TimeoutException:
        ends = time.monotonic() + 30
        while worker.state()["flushed"] == before:
            assert time.monotonic() < ends
            time.sleep(0.05)
    else:
        raise AssertionError("it answered before the caller went")


def test_not_ready_is_not_dead(worker: DynamoServer) -> None:
    """Its endpoints are ready, and its own status is not, unless one of them has a health check."""
    answer = httpx2.get(f"{worker.url}/health")
    assert answer.status_code == 503
    assert answer.json()["endpoints"]["generate"] == "ready"
    assert httpx2.get(f"{worker.url}/live").status_code == 503


def _metrics(worker: DynamoServer) -> Answer:
    answer = httpx2.get(f"{worker.url}/metrics")
    return Answer(answer.status_code, answer.content)


def test_requests_in_flight_are_counted(worker: DynamoServer) -> None:
    before = metrics_of(_metrics(worker))
    assert (before.in_flight, before.model) == (0, "tiny")
    with asking(worker, 200) as request:
        assert metrics_of(_metrics(worker)).in_flight == 1
        worker.call("pause_generation", {"mode": "keep"})
        assert metrics_of(_metrics(worker)).in_flight == 1
        worker.call("resume_generation")
        assert tokens_of(request) == 200


def test_a_life_is_told_by_its_id_and_its_time() -> None:
    with serving("vllm") as first:
        before = metrics_of(_metrics(first))
        port = int(first.url.rpartition(":")[2])
    with serving("vllm", port=port) as second:
        after = metrics_of(_metrics(second))
    assert before.worker_id != after.worker_id
    assert before.uptime_s is not None
    assert after.uptime_s is not None
