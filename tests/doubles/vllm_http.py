"""A vLLM server without a model, behind a real HTTP server on a free port.

    async with running_vllm(checkpoint) as vllm:
        vllm.model                      # what it holds; the rest as `engine_http` says

Behaviour, bodies and lies are those of `vllm_recorded.jsonl`, which is replayed against it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tests.doubles.engine_http import EngineDouble, Handler
from tests.doubles.vllm_model import Failure, Request, Vllm
from tests.doubles.vllm_replies import (
    Invalid,
    completion,
    config_of,
    error,
    failed,
    flag,
    json_body,
    metrics_text,
    models_of,
    number,
    one_of,
)

MODES = ("abort", "wait", "keep")


class VllmDouble(EngineDouble):
    """`dev`, `adapters`, `profiler`: what it was started with."""

    def __init__(self, model: Vllm, checkpoint: Path, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.checkpoint = checkpoint
        self.options: dict[str, Any] = {
            "dev": True, "adapters": True, "profile_dir": None, "api_key": None,
            "sleep_mode": True, "elastic": False, "draft": False, "instance": "1",
            "device": "cuda", "max_loras": 4, "kv_event_sources": {}, **options,
        }  # fmt: skip

    def orders(self, *paths: str) -> list[str]:
        """Orders so far, as `path?query`; all or those of these paths."""
        return [
            path + (f"?{query}" if query else "")
            for method, path, query, _ in self.calls
            if method == "POST" and (not paths or path in paths) and "/completions" not in path
        ]

    async def restart(self, model: Vllm) -> None:
        """Another life on the same port."""
        await self.stop()
        model.started_at = self.model.started_at + 60
        self.model = model
        self.options["instance"] = str(int(self.options["instance"]) + 1)
        await self.start()

    def routes(self) -> list[tuple[str, str, Handler]]:
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/health", self.health),
            ("GET", "/version", self.get_version),
            ("GET", "/metrics", self.metrics),
            ("GET", "/kv_event_sources", self.kv_event_sources),
            ("GET", "/v1/models", self.models),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/scale_elastic_ep", self.scale),
        ]
        if self.options["profile_dir"] is not None:
            routes += [
                ("POST", "/start_profile", self.start_profile),
                ("POST", "/stop_profile", self.stop_profile),
            ]
        if self.options["adapters"]:
            routes += [
                ("POST", "/v1/load_lora_adapter", self.load_lora),
                ("POST", "/v1/unload_lora_adapter", self.unload_lora),
            ]
        if not self.options["dev"]:
            return routes
        return [
            *routes,
            ("POST", "/pause", self.pause),
            ("POST", "/resume", self.resume),
            ("GET", "/is_paused", self.is_paused),
            ("POST", "/abort_requests", self.abort_requests),
            ("POST", "/sleep", self.sleep),
            ("POST", "/wake_up", self.wake_up),
            ("GET", "/is_sleeping", self.is_sleeping),
            ("POST", "/release_kv_cache_memory", self.release_kv),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("POST", "/reset_mm_cache", self.reset_other_cache),
            ("POST", "/reset_encoder_cache", self.reset_other_cache),
            ("GET", "/server_info", self.server_info),
            ("GET", "/get_world_size", self.world_size),
            ("POST", "/init_weight_transfer_engine", self.init_transfer),
            ("POST", "/shutdown_weight_transfer_engine", self.shutdown_transfer),
            ("POST", "/start_weight_update", self.start_update),
            ("POST", "/start_draft_weight_update", self.start_draft),
            ("POST", "/update_weights", self.update_weights),
            ("POST", "/finish_weight_update", self.finish_update),
            ("GET", "/weight_info", self.weight_info),
            ("POST", "/weight_checker", self.weight_checker),
        ]

    async def die(self) -> None:
        self.model.die()

    def refused(self, request: HttpRequest, path: str) -> Response | None:
        key, given = self.options["api_key"], request.headers.get("authorization")
        if key and path.startswith("/v1/") and given != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    async def carried_out(self, handler: Handler, request: HttpRequest) -> Response:
        try:
            return await handler(request)
        except Invalid as invalid:
            return error(400, "Bad Request", str(invalid), invalid.param)
        except Failure as failure:
            return failed(failure)

    # ---- reads ----

    async def health(self, _: HttpRequest) -> Response:
        return Response(status_code=503 if self.model.dead else 200)

    async def get_version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": f"0.{self.model.flavour}.0"})

    async def metrics(self, _: HttpRequest) -> Response:
        return PlainTextResponse(metrics_text(self.model))

    async def kv_event_sources(self, _: HttpRequest) -> Response:
        return JSONResponse(self.options["kv_event_sources"])

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse(models_of(self.model, self.checkpoint))

    async def server_info(self, request: HttpRequest) -> Response:
        one_of(request, "config_format", ("text", "json"), "text")
        config = config_of(self.model, self.checkpoint, self.options)
        return JSONResponse({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def world_size(self, request: HttpRequest) -> Response:
        whole = flag(request, "include_dp", default=True)
        return JSONResponse({"world_size": self.model.data_parallel_size if whole else 1})

    async def is_paused(self, _: HttpRequest) -> Response:
        try:
            self.model.alive()
        except Failure as failure:
            return JSONResponse({"error": f"Failed to check pause status: {failure}"}, 500)
        return JSONResponse({"is_paused": self.model.pause_state != "open"})

    async def is_sleeping(self, _: HttpRequest) -> Response:
        self.model.alive()
        asleep = bool(self.model.asleep) or self.model.pause_state != "open"
        return JSONResponse({"is_sleeping": asleep})

    async def weight_info(self, _: HttpRequest) -> Response:
        self.model.alive()
        return JSONResponse({"weight_version": self.model.version})

    # ---- requests ----

    async def completions(self, request: HttpRequest) -> Response:
        body = json_body(await request.body())
        model = self.model
        wanted = str(body.get("model", ""))
        if wanted != "tiny" and wanted not in model.loras:
            return error(404, "NotFoundError", f"The model `{wanted}` does not exist.", None)
        given = f"cmpl-{request.headers.get('x-request-id', 'unnamed')}"
        own = Request(
            external_id=f"{given}-0",
            adapter=model.loras.get(wanted),
            tokens=int(body.get("max_tokens", 16)),
            prompt=str(body.get("prompt")),
        )
        return await completion(model, own, given, streamed=bool(body.get("stream")))

    async def abort_requests(self, request: HttpRequest) -> Response:
        body = json_body(await request.body(), whatever="Invalid JSON format")
        ids = body.get("request_ids") or []
        try:
            self.model.alive()
            count = self.model.abort_ids(list(ids))
        except (TypeError, Failure) as broken:
            return JSONResponse({"error": f"Failed to abort requests: {broken}"}, 500)
        return JSONResponse({"status": "aborted", "aborted": count})

    # ---- orders ----

    async def pause(self, request: HttpRequest) -> Response:
        mode = one_of(request, "mode", MODES, "abort")
        flag(request, "clear_cache", default=True)
        try:
            await self.model.pause(mode)
        except Failure as failure:
            return JSONResponse({"error": f"Failed to pause generation: {failure}"}, 500)
        return JSONResponse({"status": "paused"})

    async def resume(self, _: HttpRequest) -> Response:
        try:
            self.model.resume()
        except Failure as failure:
            return JSONResponse({"error": f"Failed to resume generation: {failure}"}, 500)
        return JSONResponse({"status": "resumed"})

    async def sleep(self, request: HttpRequest) -> Response:
        level = number(request, "level", 1, 0, 2)
        mode = one_of(request, "mode", MODES, "abort")
        await self.model.sleep(level, mode)
        return JSONResponse({"status": "sleeping", "level": level})

    async def wake_up(self, request: HttpRequest) -> Response:
        tags = request.query_params.getlist("tags") or None
        awake = self.model.wake_up(tags)
        return JSONResponse({"status": "awake" if awake else "sleeping", "tags": tags})

    async def release_kv(self, _: HttpRequest) -> Response:
        self.model.release_kv()
        return JSONResponse({"status": "kv_cache_released"})

    async def reset_prefix_cache(self, request: HttpRequest) -> Response:
        forced = flag(request, "reset_running_requests", default=False)
        return JSONResponse({"success": self.model.reset_prefix_cache(forced=forced)})

    async def reset_other_cache(self, _: HttpRequest) -> Response:
        self.model.alive()
        return Response(status_code=200)

    async def init_transfer(self, request: HttpRequest) -> Response:
        self._object(await request.body(), "init_info")
        self.model.alive()
        self.model.initialised = True
        return JSONResponse({"message": "Weight transfer initialized"})

    async def shutdown_transfer(self, _: HttpRequest) -> Response:
        self.model.alive()
        if self.model.session:
            raise Failure("a weight update is in progress")
        self.model.initialised = False
        return JSONResponse({"message": "Weight transfer shut down"})

    async def start_update(self, _: HttpRequest) -> Response:
        self.model.start_update()
        return JSONResponse({"message": "Weight update started"})

    async def start_draft(self, _: HttpRequest) -> Response:
        if not self.options["draft"]:
            raise Failure("Draft model weight update requested, but no draft model is configured.")
        self.model.start_update()
        return JSONResponse({"message": "Draft weight update started"})

    async def update_weights(self, request: HttpRequest) -> Response:
        await self.model.update(self._object(await request.body(), "update_info"))
        return JSONResponse({"message": "Weights updated"})

    async def finish_update(self, request: HttpRequest) -> Response:
        sent = await request.body()
        version = json_body(sent).get("weight_version") if sent else None
        self.model.finish_update(version)
        return JSONResponse({"message": "Weight update finished"})

    async def weight_checker(self, request: HttpRequest) -> Response:
        if json_body(await request.body()).get("action") != "checksum":
            raise Invalid("only checksums here", "body.action")
        return JSONResponse({"checksums": self.model.checksums()})

    async def load_lora(self, request: HttpRequest) -> Response:
        body = json_body(await request.body())
        name, path = str(body.get("lora_name") or ""), str(body.get("lora_path") or "")
        if name in ("tiny", "tiny-alias"):
            said = f"The lora adapter '{name}' conflicts with a served base model."
            return error(400, "InvalidUserInput", said, None)
        if name in self.model.loras:
            said = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
            return error(400, "InvalidUserInput", said, None)
        if not await asyncio.to_thread(Path(path).is_dir):
            said = f"Loading lora {name} failed: No adapter found for {path}"
            return error(404, "NotFoundError", said, None)
        self.model.alive()
        self.model.loras[name] = path
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_lora(self, request: HttpRequest) -> Response:
        name = str(json_body(await request.body()).get("lora_name") or "")
        if name not in self.model.loras:
            said = f"The lora adapter '{name}' cannot be found."
            return error(404, "NotFoundError", said, None)
        del self.model.loras[name]
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def start_profile(self, request: HttpRequest) -> Response:
        sent = await request.body()
        if sent:
            json_body(sent)
        self.model.alive()
        if self.model.profiling:
            said = (
                "A profiling session is already active. Call /stop_profile before starting "
                "another session."
            )
            return error(409, "Conflict", said, None)
        self.model.profiling = True
        return Response(status_code=200)

    async def stop_profile(self, _: HttpRequest) -> Response:
        self.model.alive()
        if self.model.profiling:
            self.model.profiling = False
            self.write_trace(len(self.calls))
        return Response(status_code=200)

    def write_trace(self, number: int) -> None:
        folder = Path(self.options["profile_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.model.data_parallel_size):
            name = f"dp{rank}_pp0_tp0_dcp0_ep0_rank{rank}.{number}.pt.trace.json.gz"
            (folder / name).write_bytes(b"trace")

    async def scale(self, request: HttpRequest) -> Response:
        body = json_body(await request.body(), whatever="Invalid JSON format")
        size = body.get("new_data_parallel_size")
        if size is None:
            return error(400, "Bad Request", "new_data_parallel_size is required", None)
        if not isinstance(size, int) or size <= 0:
            said = "new_data_parallel_size must be a positive integer"
            return error(400, "Bad Request", said, None)
        if size != self.model.data_parallel_size and not self.options["elastic"]:
            return error(500, "Internal Server Error", "Scale failed", None)
        self.model.data_parallel_size = size
        return JSONResponse({"message": f"Scaled to {size} data parallel engines"})

    @staticmethod
    def _object(sent: bytes, name: str) -> Any:
        body = json_body(sent) if sent else {}
        found = body.get(name)
        if not isinstance(found, dict | list):
            raise Invalid("Field required", f"body.{name}")
        return found


@asynccontextmanager
async def running_vllm(
    checkpoint: Path, *, model: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[VllmDouble]:
    double = VllmDouble(Vllm(checkpoint, **(model or {})), checkpoint, **options)
    await double.start()
    try:
        yield double
    finally:
        await double.stop()
