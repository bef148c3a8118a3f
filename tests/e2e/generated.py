"""Generated requests to every operation that the OpenAPI document describes, and what was wrong
with the answers.

The document alone makes requests that lead nowhere: an engine that is not there, a generation that
is not the present one. So half of the cases get names that exist. What an order leaves behind is
undone every now and then, so that the next ones are not all refused for it.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import jsonschema_rs
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from schemathesis.specs.openapi.schemas import OpenApiSchema

# Not all that fits the schema can be taken: a page token must be one that was given out. And 501,
# 502, 503 are answers where they are declared, which another check sees to; 500 never is.
EXCLUDED = [positive_data_acceptance, not_a_server_error]
REOPEN_EVERY = 12
SPARE = "spare"
# Streams do not end; as pages they are the same events.
_ACCEPT = "application/json, text/html, text/plain"
_WAIT_S = 60.0

Json = dict[str, Any]


@dataclass
class Tried:
    """`statuses`: how often each status came, by operation. `wrong`: one text for each answer that
    is not as described."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return sum(sum(counted.values()) for counted in self.statuses.values())


class Prober:
    """`engine`: registered at the gateway, and thrown away afterwards."""

    def __init__(self, url: str, token: str, engine: str, weights: str, seed: int) -> None:
        """`weights`: a path on the engine's machine that an update may name."""
        self._url = url
        self._weights = weights
        self._engine = engine
        self._headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx2.Client(base_url=url, headers=self._headers, timeout=60.0)
        self._chance = random.Random(seed)
        self._seed = seed
        self._since_reopened = 0
        self._operations: list[str] = []
        self._profiles: list[str] = []
        self._document: Json = {}
        self.tried = Tried()

    def close(self) -> None:
        self._http.close()

    def prepare(self) -> None:
        """Operations of several kinds that have ended, and an engine to change and remove."""
        self._spare()
        for verb, body in (
            ("flush-caches", {"caches": ["prefix"]}),
            ("abort-requests", {"request_ids": ["nobody"]}),
            ("pause", {"mode": "drain"}),
            ("profiles", {"profiler": "memory", "duration_ms": 50}),
        ):
            self._operations.append(self._done(verb, body))
        self._profiles.append(self._operations[-1])
        self.reopen()

    def probe_all(self, examples: int) -> Tried:
        """So many cases that fit the schema and as many that do not, for each operation."""
        load_all_checks()
        self._document = self._http.get("/openapi.json").json()
        schema = schemathesis.openapi.from_dict(self._document)
        assert isinstance(schema, OpenApiSchema)
        for result in schema.get_all_operations():
            assert isinstance(result, Ok)
            operation = result.ok()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                self._probe(operation, mode, examples, self.tried)
        return self.tried

    def _probe(self, operation: Any, mode: GenerationMode, examples: int, tried: Tried) -> None:
        counted = tried.statuses.setdefault(operation.label, Counter())
        fixed = self._fixed(operation)

        @seeded(self._seed)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(data=st.data(), real=st.booleans())
        def probe(data: Any, real: bool) -> None:
            given_parts = fixed if real or mode is GenerationMode.NEGATIVE else {}
            case = data.draw(operation.as_strategy(mode, **given_parts))
            self._reopen_now_and_then()
            sent = {**self._headers, "Accept": _ACCEPT}
            if real and mode is GenerationMode.POSITIVE:
                self._make_sense(case, data.draw(st.booleans()))
                sent |= self._precondition(operation)
            began = time.monotonic()
            response = case.call(base_url=self._url, headers=sent, timeout=_WAIT_S)
            counted[response.status_code] += 1
            about = f"{operation.label} ({mode.value}, {time.monotonic() - began:.1f} s)"
            if response.status_code == 500:
                tried.wrong.append(f"{about}: 500\n{case.as_curl_command()}\n{response.text}")
                return
            excluded = EXCLUDED
            if mode is GenerationMode.NEGATIVE and self._looks_right(operation, response.request):
                excluded = [*EXCLUDED, negative_data_rejection]
            try:
                case.validate_response(response, excluded_checks=excluded, headers=sent)
            except (Failure, FailureGroup) as failure:
                tried.wrong.append(f"{about}: {_text_of(failure)}")

        # What takes nothing at all can't be asked wrongly.
        with contextlib.suppress(Unsatisfiable):
            probe()

    def _looks_right(self, operation: Any, request: Any) -> bool:
        """What does not fit the schema is not to be seen in the query itself: an empty list leaves
        nothing, and `true` where a name is wanted is a name."""
        if request.method != "GET":
            return False
        declared = {
            one["name"]: one["schema"] | {"components": self._document["components"]}
            for one in self._document["paths"][operation.path]["get"].get("parameters", [])
            if one["in"] == "query"
        }
        given = parse_qs(urlsplit(request.url).query, keep_blank_values=True)
        return all(
            name in declared and any(_fits(declared[name], form) for form in _forms(values))
            for name, values in given.items()
        )

    # ---- names that exist ----

    def _fixed(self, operation: Any) -> Json:
        changes_register = operation.path == "/v1/engines/{engine}" and operation.method != "get"
        names: dict[str, Callable[[], str]] = {
            "engine": lambda: SPARE if changes_register else self._engine,
            "operation": lambda: self._chance.choice(self._operations),
            "profile": lambda: self._chance.choice(self._profiles),
        }
        path = {name: names[name]() for name in names if f"{{{name}}}" in operation.path}
        return {"path_parameters": path} if path else {}

    def _make_sense(self, case: Any, possible: bool) -> None:
        """Take out what lets nearly every order be refused before it is judged. `possible`: and say
        what the engine can do now."""
        (case.headers or {}).pop("If-Match", None)
        if not isinstance(case.body, dict):
            return
        for name in ("expected_revision", "model", "deadline_ms"):
            case.body.pop(name, None)
        verb = case.operation.path.rpartition("/")[2]
        if possible:
            case.body |= self._possible().get(verb, {})

    def _possible(self) -> Json:
        facts = self._http.get(f"/v1/engines/{self._engine}").json()["facts"]
        released = facts["released"] or ["kv_cache"]
        return {
            "resume": {"pause_epoch": max(facts["pause_epoch"], 1)},
            "restore-resources": {
                "resources": released,
                "release_epoch": max(facts["release_epoch"], 1),
            },
            "release-resources": {"resources": ["kv_cache"], "content": "discard"},
            "update-weights": self._new_weights(None) | {"under_pause": None},
            "loras": {"path": self._weights},
            "profiles": {"profiler": "memory", "duration_ms": 20, "steps": None},
            "flush-caches": {"caches": ["prefix"]},
        }

    def _precondition(self, operation: Any) -> dict[str, str]:
        """Headers without which the most interesting part would never be reached."""
        if operation.method in ("patch", "delete") and operation.path == "/v1/engines/{engine}":
            known = self._http.get(f"/v1/engines/{SPARE}")
            if known.status_code == 404:
                return {}
            return {"If-Match": f'"g{known.json()["generation"]}"'}
        if operation.path.startswith("/v1/engines/{engine}/"):
            return {"Idempotency-Key": str(uuid.uuid4())}
        return {}

    def _spare(self) -> None:
        engine = self._http.get(f"/v1/engines/{self._engine}").json()
        made = self._http.post(
            "/v1/engines",
            json={
                "id": SPARE,
                "members": engine["members"],
                "tls": engine["tls"],
                "allow_shared_address": True,
            },
        )
        assert made.status_code == 201, made.text

    # ---- the engine as it was ----

    def _reopen_now_and_then(self) -> None:
        self._since_reopened += 1
        if self._since_reopened >= REOPEN_EVERY:
            self.reopen()

    def reopen(self) -> None:
        """Nothing under way, nothing released, weights valid, admission open."""
        self._since_reopened = 0
        self._end_all()
        facts = self._facts()
        if facts["released"]:
            released = {"resources": facts["released"], "release_epoch": facts["release_epoch"]}
            self._done("restore-resources", released)
        if (facts := self._facts())["weights"]["state"] != "valid":
            self._done("update-weights", self._new_weights(facts["pause"]))
        if (facts := self._facts())["pause"] is not None:
            self._done("resume", {"pause_epoch": facts["pause"]["epoch"]})

    def _end_all(self) -> None:
        open_states = "state=accepted&state=queued&state=running&state=cancelling&state=reconciling"
        until = time.monotonic() + _WAIT_S
        while True:
            found = self._http.get(f"/v1/operations?engine={self._engine}&{open_states}").json()
            if not found["items"]:
                return
            assert time.monotonic() < until, found
            for operation in found["items"]:
                self._http.post(f"/v1/operations/{operation['id']}/cancel", json={})
            self._ended(found["items"][0]["id"])

    def _done(self, verb: str, body: Json) -> str:
        answer = self._http.post(
            f"/v1/engines/{self._engine}/{verb}",
            json=body,
            headers={"Idempotency-Key": str(uuid.uuid4())},
        )
        assert answer.status_code == 202, answer.text
        operation_id: str = answer.json()["id"]
        self._ended(operation_id)
        return operation_id

    def _new_weights(self, pause: Json | None) -> Json:
        disk = {"source": {"disk": {"path": self._weights}}, "weight_version": "another"}
        if pause is None:
            return disk | {"pause": "abort"}
        return disk | {"under_pause": {"pause_epoch": pause["epoch"]}}

    def _ended(self, operation_id: str) -> None:
        until = time.monotonic() + _WAIT_S
        while True:
            wait = {"Prefer": "wait=20"}
            found = self._http.get(f"/v1/operations/{operation_id}", headers=wait).json()
            if found["done"]:
                return
            assert time.monotonic() < until, found

    def _facts(self) -> Json:
        # A round trip, so that what is read next is how it stands now.
        self._http.get(f"/v1/engines/{self._engine}/capabilities")
        facts: Json = self._http.get(f"/v1/engines/{self._engine}").json()["facts"]
        return facts


def _fits(schema: Json, value: object) -> bool:
    return bool(jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value))


def _forms(values: list[str]) -> Iterator[object]:
    """What a query parameter may stand for."""
    yield values
    if len(values) == 1:
        yield values[0]
        with contextlib.suppress(ValueError):
            yield int(values[0])


def _text_of(failure: Failure | FailureGroup) -> str:
    if isinstance(failure, FailureGroup):
        return "\n".join(str(one) for one in failure.exceptions)
    return str(failure)
