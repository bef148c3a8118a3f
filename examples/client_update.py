"""New weights for a serving engine, ordered with a client that is generated from docs/openapi.json.

scripts/gen-client
.venv-client/bin/python examples/client_update.py WEIGHTS VERSION --engine demo

Three orders: a pause that drains, the update under that pause, and its resume. Each has a key of
its own, so that it may be sent again after a lost answer; names the revision that the one before
led to, so that it is refused where somebody has changed the engine in between; and is followed on
its event stream to its end. Address and token of the gateway come from CHADBURN_URL and
CHADBURN_TOKEN, or from a demo that runs in this folder.
"""

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from chadburn_client import AuthenticatedClient
from chadburn_client.api.engines import get_engine
from chadburn_client.api.operations import get_operation
from chadburn_client.api.orders import pause, resume, update_weights
from chadburn_client.models import (
    DiskSourceBody,
    OperationState,
    PauseBody,
    PauseMode,
    ProblemDocument,
    ResumeBody,
    UnderPauseBody,
    UpdateWeightsBody,
    WeightSourceBody,
)

_PATIENCE_S = 60.0
_WORTH_ANOTHER_TRY = (429, 503, 504)


class Refused(Exception):
    """What the gateway said. Nothing was done."""


class Orders:
    """To one engine, under keys that begin with the name of this run."""

    def __init__(self, client: Any, engine: str, run: str) -> None:
        self.client = client
        self.engine = engine
        self.run = run

    def revision(self) -> int:
        return int(self._sent(get_engine.sync_detailed, engine=self.engine).revision)

    def carried_out(self, name: str, call: Callable[..., Any], body: Any, revision: int) -> Any:
        """The operation after its end, which `call` orders if the engine is at that revision."""
        asked = {"idempotency_key": f"{self.run}-{name}", "if_match": f'"r{revision}"'}
        operation = self._sent(call, engine=self.engine, body=body, **asked)
        print(f"{name}: {operation.id}", flush=True)
        self._follow(operation.id)
        return self._sent(get_operation.sync_detailed, operation=operation.id)

    def _sent(self, call: Callable[..., Any], **given: Any) -> Any:
        """The same call again while there is no answer, or one that says "not now": that is what
        the key is for, and reads may be repeated anyhow."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                answer = call(client=self.client, **given)
            except httpx.TransportError as error:
                said = f"no answer ({error})"
            else:
                if not isinstance(answer.parsed, ProblemDocument):
                    return answer.parsed
                said = f"{answer.parsed.reason}: {answer.parsed.detail or answer.parsed.title}"
                if answer.status_code not in _WORTH_ANOTHER_TRY:
                    raise Refused(said)
            if time.monotonic() > until:
                raise Refused(said)
            print(f"  {said}; once more", flush=True)
            time.sleep(0.5)

    def _follow(self, operation_id: str) -> None:
        """Returns when the stream has told the terminal event. One that breaks is taken up where it
        ended; the operation goes on without it. Generated clients know no streams: the same
        connection, and the path of the document."""
        http, path = self.client.get_httpx_client(), f"/v1/operations/{operation_id}/events"
        headers, done = {"accept": "text/event-stream"}, False
        while not done:
            try:
                with http.stream("GET", path, headers=headers, timeout=_PATIENCE_S) as stream:
                    done = stream.status_code == 204  # all of it was told
                    for number, kind, event in _events(stream.iter_lines()):
                        headers["last-event-id"] = number
                        print(f"  {kind:<11}{json.dumps(event['data'])[:90]}", flush=True)
                        done = kind in ("completed", "failed", "cancelled", "settled")
            except httpx.TransportError as error:
                print(f"  the stream broke ({error}); from there on", flush=True)
            time.sleep(0 if done else 0.2)


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str, Any]]:
    """Server-sent events that have a place in the ledger: id, type, data."""
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if line:
            found[name] = value.removeprefix(" ")
        else:
            if "id" in found and "data" in found:
                yield found["id"], found["event"], json.loads(found["data"])
            found = {}


def tell_failure(name: str, operation: Any) -> None:
    message = operation.error.message if operation.error else operation.verification
    print(f"{name}: {operation.state}: {message}", file=sys.stderr)


def update(orders: Orders, weights: Path, version: str) -> bool:
    """Whether the engine serves the new weights, and is open again."""
    paused = orders.carried_out(
        "pause", pause.sync_detailed, PauseBody(mode=PauseMode.DRAIN), orders.revision()
    )
    if paused.state != OperationState.SUCCEEDED:
        tell_failure("pause", paused)
        return False
    epoch = paused.result["pause_epoch"]
    body = UpdateWeightsBody(
        source=WeightSourceBody(disk=DiskSourceBody(path=str(weights.resolve()))),
        weight_version=version,
        under_pause=UnderPauseBody(pause_epoch=epoch),
    )
    updated = orders.carried_out("update", update_weights.sync_detailed, body, paused.revision)
    good = bool(updated.state == OperationState.SUCCEEDED)
    if not good:
        # With its earlier weights the engine can go on. Where the failure has left others, or
        # nobody knows which, the resume is refused, and says so.
        print(
            f"update: {updated.state}: {updated.error and updated.error.message}", file=sys.stderr
        )
    lift = ResumeBody(pause_epoch=epoch)
    resumed = orders.carried_out("resume", resume.sync_detailed, lift, orders.revision())
    return good and bool(resumed.state == OperationState.SUCCEEDED)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("weights", type=Path, help="a folder with safetensors, as the engine's host sees it")
    add("version", help="what they are called")
    add("--engine", default="demo")
    add(
        "--run", default=str(uuid.uuid4()), help="begins the key of each order; a new one each time"
    )
    given = parser.parse_args()
    url, token = os.environ.get("CHADBURN_URL"), os.environ.get("CHADBURN_TOKEN")
    if not url or not token:
        ready = json.loads(Path(".data/demo/ready.json").read_text())
        url, token = ready["base_url"], ready["tokens"]["operator"]
    with AuthenticatedClient(base_url=url, token=token) as client:
        try:
            good = update(Orders(client, given.engine, given.run), given.weights, given.version)
        except Refused as refused:
            print(f"refused: {refused}", file=sys.stderr)
            return 1
    print("served" if good else "not updated", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
