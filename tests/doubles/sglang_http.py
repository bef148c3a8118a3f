"""An SGLang server without a model, behind a real HTTP server on a free port.

    async with running_sglang(checkpoint) as sglang:
        sglang.model                    # what it holds; the rest as `engine_http` says

Behaviour, bodies, lies and ends are those of `sglang_recorded.jsonl`, which is replayed against it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.doubles.engine_http import EngineDouble, Handler
from tests.doubles.sglang_model import MODES, Death, No, Request, Sglang
from tests.doubles.sglang_replies import (
    FLUSHED,
    OPEN_TO_ALL,
    SECRETS,
    Invalid,
    administrative,
    events_of,
    generated,
    info_of,
    invalid,
    json_body,
    loads_of,
    model_info_of,
    models_of,
    ranks_of,
    text,
)


class SglangDouble(EngineDouble):
    """`options`: what it was started with."""

    def __init__(self, model: Sglang, checkpoint: Path, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.checkpoint = checkpoint
        self.options: dict[str, Any] = {
            "api_key": None, "admin_api_key": None, "memory_saver": True, "backup": False,
            "lora": True, "elastic": None, "switch": False, "draft": None, "device": "cuda",
            "version": "0.5.23", "max_loaded_loras": model.slots, **options,
        }  # fmt: skip

    def orders(self, *paths: str) -> list[str]:
        """Orders so far, as `path?query`; all or those of these paths."""
        looks = ("/generate", "/weights_checker")
        return [
            path + (f"?{query}" if query else "")
            for method, path, query, body in self.calls
            if method == "POST"
            and (not paths or path in paths)
            and path not in looks
            and b"chadburn-" not in body[:32]
        ]

    async def die(self) -> None:
        """With all that was under way, and for good."""
        self.model.dead = True
        self._dying = asyncio.create_task(self.vanish())

    async def restart(self, model: Sglang) -> None:
        """Another life on the same port."""
        await self.stop()
        model.seed = self.model.seed + 1
        self.model = model
        await self.start()

    def refused(self, request: HttpRequest, path: str) -> Response | None:
        key, admin = self.options["api_key"], self.options["admin_api_key"]
        if path.startswith(OPEN_TO_ALL):
            return None
        wanted = (admin or key) if administrative(path) else key
        if wanted and request.headers.get("authorization") != f"Bearer {wanted}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    async def carried_out(self, handler: Handler, request: HttpRequest) -> Response:
        try:
            return await handler(request)
        except Invalid as wrong:
            return invalid(str(wrong))
        except No as no:
            return JSONResponse({"success": False, "message": str(no)}, 400)
        except Death:
            await self.die()
            await asyncio.Event().wait()
            raise

    def routes(self) -> list[tuple[str, str, Handler]]:
        reads: list[tuple[str, str, Handler]] = [
            ("GET", "/ready", self.ready),
            ("GET", "/health", self.health),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/model_info", self.model_info),
            ("GET", "/server_info", self.server_info),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/loads", self.loads),
            ("GET", "/is_scaling_elastic_ep", self.is_scaling),
        ]
        return [*reads, *(("POST", path, handler) for path, handler in self._orders().items())]

    def _orders(self) -> dict[str, Handler]:
        return {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/flush_cache": self.flush,
            "/pause_generation": self.pause,
            "/continue_generation": self.proceed,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.resume,
            "/update_weights_from_disk": self.update_from_disk,
            "/update_weights_from_tensor": self.update_from_tensor,
            "/update_weights_from_distributed": self.update_from_group,
            "/init_weights_update_group": self.init_group,
            "/destroy_weights_update_group": self.destroy_group,
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
            "/update_weight_version": self.set_version,
            "/weights_checker": self.weights_checker,
            "/load_lora_adapter": self.load_lora,
            "/unload_lora_adapter": self.unload_lora,
            "/start_profile": self.start_profile,
            "/stop_profile": self.stop_profile,
            "/pd_role_switch": self.switch_role,
            "/scale_elastic_ep": self.scale,
        }

    # ---- reads ----

    async def ready(self, _: HttpRequest) -> Response:
        model = self.model
        ready = model.healthy and not model.starting and not model.front_paused
        return Response(status_code=200 if ready else 503)

    async def health(self, _: HttpRequest) -> Response:
        """By a token, for which it waits."""
        if self.model.starting:
            return Response(status_code=503)
        hangs = self.model.front_paused or self.model.held or self.model.stuck
        await asyncio.sleep(self.model.hang_s if hangs else 0.01)
        self.model.healthy = not hangs
        return Response(status_code=503 if hangs else 200)

    async def openapi(self, _: HttpRequest) -> Response:
        paths: dict[str, Any] = {path: {} for _, path, _ in self.routes()}
        return JSONResponse({"openapi": "3.1.0", "paths": paths})

    async def model_info(self, _: HttpRequest) -> Response:
        return JSONResponse(model_info_of(self.model))

    async def server_info(self, _: HttpRequest) -> Response:
        await self.model.answer()
        return JSONResponse({**info_of(self.model, self.options), **SECRETS})

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse(models_of(self.model))

    async def loads(self, _: HttpRequest) -> Response:
        now = datetime.fromtimestamp(time.time(), UTC).isoformat()
        return JSONResponse(loads_of(self.model, now))

    async def is_scaling(self, _: HttpRequest) -> Response:
        if self.options["elastic"] is None:
            return _not_elastic()
        state = {"is_scaling_elastic_ep": False, "effective_ep_size": self.model.dp,
                 "pending_ep_size": None, "scale_phase": "idle", "last_error": None}  # fmt: skip
        return JSONResponse(state)

    # ---- requests ----

    async def generate(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        if not any(body.get(name) for name in ("text", "input_ids")):
            said = "Either text, input_ids or input_embeds should be provided."
            return JSONResponse({"error": {"message": said}}, 400)
        wanted = body.get("lora_path")
        if wanted is not None and wanted not in self.model.loras:
            if wanted not in self.model.known_loras:
                return JSONResponse({"error": {"message": f"no adapter {wanted}"}}, 400)
            self.model.loras[wanted] = self.model.known_loras[wanted]  # by itself
        rid = str(body.get("rid") or f"own-{len(self.calls)}")
        if any(one.rid == rid for one in self.model.requests):
            said = f"Duplicate request ID detected: {rid}"
            return JSONResponse({"error": {"message": said}}, 400)
        sampling = body.get("sampling_params") or {}
        own = Request(
            rid=rid,
            tokens=int(sampling.get("max_new_tokens", 16)),
            prompt=str(body.get("text") or body.get("input_ids")),
            adapter=self.model.known_loras.get(wanted) if wanted else None,
        )
        events = events_of(self.model, own)
        if body.get("stream"):
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(await generated(self.model, own))

    async def abort_request(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        rid = body.get("rid", "")
        if not isinstance(rid, str):
            raise Invalid("rid")
        self.model.abort(rid, everything=bool(body.get("abort_all")))
        return Response(status_code=200)

    # ---- orders ----

    async def flush(self, request: HttpRequest) -> Response:
        try:
            timeout = float(request.query_params.get("timeout", 0))
        except ValueError:
            timeout = -1
        if timeout < 0:
            raise Invalid("timeout")
        await self.model.answer()
        give_up_at = time.monotonic() + timeout
        while timeout and not self.model.idle():
            if time.monotonic() >= give_up_at:
                return text("Timed out waiting for idle state.", 400)
            await asyncio.sleep(0.01)
        if not self.model.flush():
            return text("Flush cache failed.\n", 400)
        return text(FLUSHED)

    async def pause(self, request: HttpRequest) -> Response:
        mode = (await json_body(request)).get("mode", "abort")
        if mode not in MODES:
            raise Invalid("mode")
        await self.model.pause(mode)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def proceed(self, request: HttpRequest) -> Response:
        await json_body(request)
        self.model.proceed()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def release(self, request: HttpRequest) -> Response:
        tags = _tags(await json_body(request))
        await self.model.answer()
        self.model.release(tags)
        return JSONResponse(None)

    async def resume(self, request: HttpRequest) -> Response:
        tags = _tags(await json_body(request))
        await self.model.answer()
        self.model.resume(tags)
        return JSONResponse(None)

    async def update_from_disk(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        if not isinstance(body.get("model_path"), str):
            raise Invalid("model_path")
        await self.model.answer()
        paused: Any = 0 if self.model.dp == 1 else [0] * self.model.dp
        try:
            said = await self.model.update_from_disk(
                body["model_path"], body.get("weight_version"), flush=body.get("flush_cache", True)
            )
        except No as no:
            said = " | ".join([str(no)] * self.model.dp)
            refusal = {"success": False, "message": said, "num_paused_requests": paused}
            return JSONResponse(refusal, 400)
        if self.model.dp > 1:
            said = " | ".join(["Succeeded to update model weights."] * self.model.dp)
        return JSONResponse({"success": True, "message": said, "num_paused_requests": paused})

    async def update_from_tensor(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        payloads = body.get("serialized_named_tensors")
        if not isinstance(payloads, list) or any("!" in one for one in payloads):
            raise Invalid("serialized_named_tensors")
        if body.get("selector", "all") not in ("all", "target", "draft"):
            raise Invalid("selector")
        await self.model.answer()
        said = await self.model.update_from_tensor(
            payloads,
            body.get("load_format"),
            body.get("weight_version"),
            flush=body.get("flush_cache", True),
        )
        return _success(said)

    async def init_group(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        if not isinstance(body.get("master_port"), int):
            raise Invalid("master_port")
        if self.model.dp > 1:
            return text("Internal Server Error", 500)
        await self.model.answer()
        name = body.get("group_name", "weight_update_group")
        backend = body.get("backend", "nccl")
        return _success(await self.model.init_group(name, body["master_port"], backend))

    async def destroy_group(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        await self.model.answer()
        return _success(self.model.destroy_group(body.get("group_name", "weight_update_group")))

    async def update_from_group(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        await self.model.answer()
        flush = body.get("flush_cache", True)
        return _success(await self.model.update_from_group(body, flush=flush))

    async def begin(self, request: HttpRequest) -> Response:
        await json_body(request)
        await self.model.answer()
        self.model.begin()
        return _success(" | ".join(["Success"] * self.model.dp))

    async def end(self, request: HttpRequest) -> Response:
        await json_body(request)
        await self.model.answer()
        self.model.end()
        return _success(" | ".join(["Success"] * self.model.dp))

    async def set_version(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        version = body.get("new_version")
        if not isinstance(version, str):
            raise Invalid("new_version")
        if body.get("abort_all_requests", True):
            self.model.abort("", everything=True)
        self.model.version = version
        said = f"Weight version updated to {version}"
        return JSONResponse({"success": True, "message": said, "new_version": version})

    async def weights_checker(self, request: HttpRequest) -> Response:
        sent = await request.body()
        body = json.loads(sent) if sent else {}
        if body.get("action", "checksum") != "checksum":
            raise No("Unsupported action")
        await self.model.answer()
        ranks = [] if body.get("selector") == "draft" else ranks_of(self.model)
        return JSONResponse(
            {"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": "0"}
        )

    async def load_lora(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        await self.model.answer()
        try:
            name, path = body["lora_name"], body["lora_path"]
            if not await asyncio.to_thread((Path(path) / "adapter_config.json").is_file):
                raise No(f"[Errno 2] No such file or directory: '{path}/adapter_config.json'")
            self.model.load_lora(name, path)
        except No as no:
            return self._adapters(str(no), self.model.loras)
        return self._adapters("", self.model.loras)

    async def unload_lora(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        await self.model.answer()
        try:
            await self.model.unload_lora(body["lora_name"])
        except No as no:
            return self._adapters(str(no), None)
        return self._adapters("", self.model.loras)

    @staticmethod
    def _adapters(error: str, loaded: dict[str, str] | None) -> Response:
        body = {"rid": None, "http_worker_ipc": None, "success": not error,
                "error_message": error, "loaded_adapters": loaded}  # fmt: skip
        return JSONResponse(body, 400 if error else 200)

    async def start_profile(self, request: HttpRequest) -> Response:
        sent = await request.body()
        self.model.profile = json.loads(sent) if sent else {"output_dir": "/tmp"}
        if self.model.profile.get("num_steps"):
            self.model.stop_profile()
        return text("Start profiling.\n")

    async def stop_profile(self, _: HttpRequest) -> Response:
        try:
            self.model.stop_profile()
        except No:
            return Response("Internal Server Error", 500, media_type="text/plain")
        return text("Stop profiling. This will take some time.\n")

    async def switch_role(self, request: HttpRequest) -> Response:
        wanted = (await json_body(request)).get("new_role")
        said: dict[str, Any] = {"rid": None, "http_worker_ipc": None,
                                "old_role": self.model.role, "new_role": wanted}  # fmt: skip
        if not self.options["switch"]:
            no = "--enable-pd-role-switch is not set on this server"
            refusal = {**said, "success": False, "message": no, "safe_to_restore": True}
            return JSONResponse(refusal, 400)
        self.model.role = str(wanted)
        return JSONResponse({**said, "success": True, "message": "ok", "safe_to_restore": False})

    async def scale(self, request: HttpRequest) -> Response:
        size = (await json_body(request)).get("new_ep_size")
        if not isinstance(size, int) or size <= 0:
            return JSONResponse({"error": "new_ep_size must be a positive integer"}, 400)
        if self.options["elastic"] is None:
            return _not_elastic()
        old, self.model.dp = self.model.dp, size
        return JSONResponse({"message": "ok", "old_ep_size": old, "new_ep_size": size})


def _not_elastic() -> Response:
    return JSONResponse({"error": "elastic EP is not enabled (set --elastic-ep-backend)"}, 404)


def _success(said: str) -> Response:
    return JSONResponse({"success": True, "message": said})


def _tags(body: dict[str, Any]) -> list[str] | None:
    tags = body.get("tags")
    if tags is not None and not isinstance(tags, list):
        raise Invalid("tags")
    return tags


@asynccontextmanager
async def running_sglang(
    checkpoint: Path, *, model: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[SglangDouble]:
    double = SglangDouble(Sglang(checkpoint, **(model or {})), checkpoint, **options)
    await double.start()
    try:
        yield double
    finally:
        await double.stop()
