"""A TensorRT-LLM server without a model, behind a real HTTP server on a free port.

    async with running_trtllm() as trtllm:
        trtllm.memory                   # what is parked; the rest as `engine_http` says

Written from what TensorRT-LLM's documentation and sources say of its routes, states, tags and
signatures. No such server has been asked: what they do not say is marked as a guess.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.doubles.engine_http import EngineDouble, Handler

KEY = "replace-with-a-long-random-secret"
TAGS = (
    "sampler", "drafter", "guided_decoder", "spec_resource_manager", "model_extra",
    "executor_extra", "kv_cache", "model", "model_weights", "draft_model", "draft_model_weights",
)  # fmt: skip
CONTROL = ("/release_memory", "/resume_memory", "/memory_status")
AUTH = "x-trtllm-runtime-control-"
MODEL = "tiny"


class Conflict(Exception):
    pass


class WorkerFailed(Exception):
    pass


class Memory:
    """The state machine of one process. `fails`: so many operations break in the middle."""

    def __init__(self) -> None:
        self.state = "running"
        self.parked: list[str] = []
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.fails = 0

    @property
    def admits(self) -> bool:
        return self.state == "running"

    def began(self) -> None:
        self.running += 1
        self.idle.clear()

    def ended(self) -> None:
        self.running -= 1
        if not self.running:
            self.idle.set()

    async def release(self, tags: list[str]) -> None:
        if self.state == "parked" and set(tags) <= set(self.parked):
            return
        if self.state == "parked":
            raise Conflict("Runtime memory is already parked")
        self._must_be("running", "release")
        self.state = "parking"
        await self.idle.wait()
        self._may_fail()
        self.parked = list(tags)
        self.state = "parked"

    async def resume(self, tags: list[str] | None) -> None:
        if self.state == "running":
            return
        self._must_be("parked", "resume")
        self.state = "waking"
        await asyncio.sleep(0)
        self._may_fail()
        self.parked = [tag for tag in self.parked if tags is not None and tag not in tags]
        self.state = "parked" if self.parked else "running"

    def _must_be(self, state: str, what: str) -> None:
        if self.state != state:
            raise Conflict(f"Cannot {what} runtime memory while state is '{self.state}'.")

    def _may_fail(self) -> None:
        if self.fails:
            self.fails -= 1
            self.state = "failed"
            raise WorkerFailed("worker failed")


class TrtllmDouble(EngineDouble):
    """`sleep_mode`: the routes of runtime control are there. `scheme`: `request`, `body`; None: of
    a server from before, which has the routes without a status and asks for no signature. `skew_s`:
    by how much its clock is ahead. `most_nonces`: that it remembers. `token_s`: a token's time."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "sleep_mode": True, "scheme": "request", "key": KEY, "skew_s": 0, "most_nonces": 4096,
            "token_s": 0.002, **options,
        }  # fmt: skip
        self.memory = Memory()
        self.dead = False
        self.nonces: dict[str, int] = {}
        self.aborted = 0

    def orders(self, *paths: str) -> list[tuple[str, Any]]:
        """Of runtime control, so far: path and tags."""
        return [
            (path, json.loads(body).get("tags") if body else None)
            for method, path, _, body in self.calls
            if method == "POST" and path in CONTROL and (not paths or path in paths)
        ]

    async def die(self) -> None:
        """The engine ends; the server stays, and says so."""
        self.dead = True

    async def restart(self) -> None:
        """Another process on the same port."""
        await self.stop()
        self.memory, self.dead = Memory(), False
        self.nonces.clear()
        await self.start()

    def routes(self) -> list[tuple[str, str, Handler]]:
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/health", self.health),
            ("GET", "/health_generate", self.health_generate),
            ("GET", "/version", self.version),
            ("GET", "/v1/models", self.models),
            ("POST", "/v1/completions", self.completions),
        ]
        if self.options["sleep_mode"]:
            routes += [
                ("POST", "/release_memory", self.release),
                ("POST", "/resume_memory", self.resume),
            ]
            if self.options["scheme"] is None:
                routes.append(("POST", "/update_weights", self.update_weights))
            else:
                routes.append(("GET", "/memory_status", self.status))
        return routes

    # ---- signatures: judged before the route is entered, which claims the number ----

    def refused(self, request: Request, path: str) -> Response | None:
        if path not in CONTROL or self.options["scheme"] is None:
            return None
        why = self._judge(request, path, self.calls[-1][3])
        return None if why is None else error(401, why)

    def _judge(self, request: Request, path: str, body: bytes) -> str | None:
        headers, key = request.headers, str(self.options["key"]).encode()
        given = headers.get(f"{AUTH}auth", "")
        wrong = "Invalid runtime control request authentication."
        if self.options["scheme"] == "body":
            right = hmac.new(key, body, hashlib.sha256).hexdigest()
            return None if hmac.compare_digest(given, f"sha256={right}") else wrong
        timestamp, nonce = headers.get(f"{AUTH}timestamp", ""), headers.get(f"{AUTH}nonce", "")
        if not timestamp.isdecimal() or re.fullmatch("[0-9a-f]{32}", nonce) is None:
            return wrong
        signed = "\n".join(
            ("trtllm-runtime-control-v1", request.method, path, timestamp, nonce, "")
        )
        right = hmac.new(key, signed.encode() + body, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(given, f"sha256={right}"):
            return wrong
        now = int(time.time()) + int(self.options["skew_s"])
        if abs(now - int(timestamp)) > 300:
            return "Runtime control request timestamp is outside the validity window."
        for known in [known for known, until in self.nonces.items() if until < now]:
            del self.nonces[known]
        if nonce in self.nonces:
            return "Runtime control request nonce has already been used."
        if len(self.nonces) >= int(self.options["most_nonces"]):
            return "Runtime control replay cache capacity exceeded."
        self.nonces[nonce] = int(timestamp) + 300
        return None

    # ---- runtime control ----

    async def release(self, request: Request) -> Response:
        return await self._moved(request, "release")

    async def resume(self, request: Request) -> Response:
        return await self._moved(request, "resume")

    async def _moved(self, request: Request, how: str) -> Response:
        body = await request.body()
        tags = json.loads(body).get("tags") if body else None
        if tags is not None and (not tags or not set(tags) <= set(TAGS)):
            return error(400, "bad tag")
        try:
            if how == "release":
                await self.memory.release(list(TAGS) if tags is None else tags)
            else:
                await self.memory.resume(tags)
        except Conflict as conflict:
            return error(409, str(conflict))
        except WorkerFailed as failed:
            return error(500, str(failed))
        return JSONResponse({"status": "success"})

    async def status(self, _: Request) -> Response:
        return JSONResponse({"state": self.memory.state, "parked_tags": self.memory.parked})

    async def update_weights(self, _: Request) -> Response:
        raise AssertionError("pickled handles were sent to it")

    # ---- what it is, and requests ----

    async def health(self, _: Request) -> Response:
        if self.dead:
            return Response("LLM is unavailable. Please check the server logs.", 503)
        return Response(status_code=200)

    async def health_generate(self, _: Request) -> Response:
        if self.dead or not self.memory.admits:
            return Response("Generation health check failed", 500)
        return Response("Generation health check OK")

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": "1.3.0rc1"})

    async def models(self, _: Request) -> Response:
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "tensorrt_llm"}
        return JSONResponse({"object": "list", "data": [card]})

    async def completions(self, request: Request) -> Response:
        body = json.loads(await request.body())
        unknown = set(body) - _FIELDS
        if unknown:
            return JSONResponse({"error": f"Extra inputs are not permitted: {unknown}"}, 400)
        if self.dead or not self.memory.admits:  # that it refuses is said; how is a guess
            return _bad_request("the runtime is parked")
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.memory.began()
        made, most = 0, int(body.get("max_tokens") or 16)
        try:
            for made in range(1, most + 1):
                choice = {"index": 0, "text": " x", "finish_reason": None, "stop_reason": None}
                if made == most:
                    choice["finish_reason"] = "length"
                yield _event({"choices": [choice]})
                await asyncio.sleep(float(self.options["token_s"]))
            usage = {"prompt_tokens": 1, "completion_tokens": made, "total_tokens": made + 1}
            yield _event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.aborted += 1  # its caller has hung up
            raise
        finally:
            self.memory.ended()


_FIELDS = {
    "model", "prompt", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k",
    "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "min_tokens",
    "ignore_eos", "include_stop_str_in_output", "stop", "stop_token_ids", "cache_salt",
}  # fmt: skip


def error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


def _bad_request(message: str) -> Response:
    said = {
        "object": "error", "message": message, "type": "BadRequestError", "param": None,
        "code": 400,
    }  # fmt: skip
    return JSONResponse(said, 400)


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps({'id': 'cmpl-1', 'model': MODEL, **document})}\n\n"


@asynccontextmanager
async def running_trtllm(**options: Any) -> AsyncIterator[TrtllmDouble]:
    double = TrtllmDouble(**options)
    await double.start()
    try:
        yield double
    finally:
        await double.stop()
