"""A Dynamo worker without an engine: what its callbacks do and say, by the names of its routes.

    worker = Worker("vllm")
    await worker.callbacks()["pause_generation"]({"mode": "keep"})
    async for token in worker.generate(10): ...

Names, answers and conduct are those of the workers of ai-dynamo 1.6.1. The same object stands
behind the double of the system server, and behind Dynamo's own runtime (tests/dynamo), so that it
needs nothing but Python.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Callback = Callable[[Any], Awaitable[Any]]
KINDS = ("vllm", "vllm-sidecar", "sglang", "trtllm")
_NO_OBJECT = {"status": "error", "message": "request body must be a JSON object"}
_PAUSE_FIRST = (
    "Worker must be paused via pause_generation() before updating weights. Call"
    " pause_generation() first, then update, then resume_generation()."
)


@dataclass(eq=False)
class Request:
    request_id: str = ""
    lora: str | None = None
    ended: bool = False


@dataclass
class Worker:
    """`paused`: as its own flag has it, which updates ask for. `state`: of the engine, `open`,
    `new` (what runs goes on), `all`. `level`: of its sleep, 0 awake. `dead`: the engine has ended.
    `lies`: an update says that it is done, and does nothing. `routing` is told whether requests may
    be sent here. `odd`: with callbacks that show what the system server itself does."""

    kind: str = "vllm"
    lora: bool = True
    version: str | None = None
    state: str = "open"
    paused: bool = False
    level: int = 0
    weights: str = "first"
    dead: bool = False
    lies: bool = False
    update_error: str | None = None
    loras: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    flushed: int = 0
    routed: bool = True
    token_s: float = 0.002
    calls: list[tuple[str, Any]] = field(default_factory=list)
    routing: Callable[[bool], Awaitable[None]] | None = None
    odd: bool = False

    def __post_init__(self) -> None:
        self._moved = asyncio.Event()
        self._lock = asyncio.Lock()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _route(self, routed: bool) -> None:
        self.routed = routed
        if self.routing is not None:
            await self.routing(routed)

    def callbacks(self) -> dict[str, Callback]:
        found = {
            "vllm": self._vllm, "vllm-sidecar": self._sidecar, "sglang": self._sglang,
            "trtllm": self._trtllm,
        }  # fmt: skip
        routes = {**found[self.kind](), **(ODD if self.odd else {})}
        return {name: self._noted(name, one) for name, one in routes.items()}

    def _noted(self, name: str, callback: Callback) -> Callback:
        async def called(body: Any) -> Any:
            self.calls.append((name, body))
            return await callback(body)

        return called

    # ---- the engine ----

    async def generate(
        self, tokens: int, request_id: str = "", lora: str | None = None
    ) -> AsyncIterator[int]:
        request = Request(request_id, lora)
        self.requests.append(request)
        try:
            for number in range(tokens):
                while self.state == "all" or (self.state == "new" and not number):
                    if request.ended:
                        return
                    await self._moved.wait()
                if request.ended:
                    return
                if self.level or self.weights == "broken":
                    self.dead = True  # a step on memory that is not there
                    return
                await asyncio.sleep(self.token_s)
                yield number
        finally:
            self.requests.remove(request)
            self._wake()

    async def _pause(self, mode: str) -> None:
        self._alive()
        self.state = "all" if mode == "keep" else "new"
        if mode == "abort":
            self._end(self.requests)
        self._wake()
        while mode != "keep" and self.requests and self.state != "open":
            await self._moved.wait()

    def _resume(self) -> None:
        self._alive()
        self.state = "open"
        self._wake()

    def _end(self, requests: list[Request]) -> None:
        for request in requests:
            request.ended = True
        self._wake()

    def _alive(self) -> None:
        if self.dead:
            raise RuntimeError("EngineCore encountered an issue. See stack trace above.")

    def _load(self, path: str, version: str | None) -> None:
        self._alive()
        if self.level:
            self.dead = True
        self._alive()
        if self.update_error is not None:
            self.weights = "broken"
            raise RuntimeError(self.update_error)
        if self.lies:
            return
        content = b"".join(file.read_bytes() for file in sorted(Path(path).glob("*.safetensors")))
        if not content:
            self.weights = "broken"
            raise RuntimeError(f"Cannot find any safetensors weights in {path}")
        self.weights = hashlib.sha256(content).hexdigest()
        if version is not None:
            self.version = version

    # ---- Dynamo's worker with vLLM in it ----

    def _vllm(self) -> dict[str, Callback]:
        routes = {
            "control/sleep": self.sleep,
            "control/wake_up": self.wake_up,
            "liveness_probe": self.liveness_probe,
            "pause_generation": self.pause_generation,
            "resume_generation": self.resume_generation,
            "flush_cache": self.flush_cache,
            "abort_request": self.abort_request,
            "update_weights_from_disk": self.update_weights_from_disk,
            "get_weight_version": self.get_weight_version,
            "set_weight_version": self.set_weight_version,
        }
        if self.lora:
            routes |= {"load_lora": self.load_lora, "unload_lora": self.unload_lora}
        one_by_one = {"control/sleep", "control/wake_up", "pause_generation", "resume_generation",
                      "flush_cache", "update_weights_from_disk"}  # fmt: skip
        return {
            name: _told(self._alone(route) if name in one_by_one else route)
            for name, route in routes.items()
        }

    def _alone(self, route: Callback) -> Callback:
        """A drain keeps all of these waiting until it is over, whoever has given up on it."""

        async def waits(body: Any) -> Any:
            async with self._lock:
                return await route(body)

        return waits

    async def liveness_probe(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.dead:
            return {"status": "error", "alive": False, "message": "the engine is dead"}
        return {"status": "ok", "alive": True}

    async def pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        mode, clear = body.get("mode", "keep"), bool(body.get("clear_cache", False))
        if mode not in ("keep", "wait", "abort"):
            return _failed(f"Invalid mode '{mode}'; expected keep|wait|abort")
        adapters = sorted({one.lora for one in self.requests if one.lora})
        if mode == "keep" and adapters:
            active = ", ".join(adapters)
            return _failed(
                f"Cannot pause generation in keep mode with active LoRA requests: {active}"
            )
        await self._pause(mode)
        self.paused = True
        return {"status": "ok", "message": "Engine paused", "mode": mode, "clear_cache": clear}

    async def resume_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        self._resume()
        self.paused = False
        return {"status": "ok", "message": "Engine resumed"}

    async def flush_cache(self, body: dict[str, Any]) -> dict[str, Any]:
        """Says so also where requests have kept the cache from being emptied."""
        self._alive()
        self.flushed += not self.requests
        return {"status": "ok", "message": "Cache flushed"}

    async def abort_request(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body.get("request_id")
        if not name:
            return _failed("Missing 'request_id' in body")
        self._end([one for one in self.requests if one.request_id == name])
        return {"status": "ok", "request_id": name}

    async def get_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        declared = self.version is not None
        return {"status": "ok", "version": self.version, "version_declared": declared}

    async def set_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        if "weight_version" not in body:
            return _failed("Missing 'weight_version' in body")
        self.version = body["weight_version"]
        return {"status": "ok", "version": self.version}

    async def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.paused:
            return _failed(_PAUSE_FIRST)
        if not body.get("model_path"):
            return _failed("Missing 'model_path' in body")
        self._load(body["model_path"], body.get("weight_version"))
        version = body.get("weight_version", "unknown")
        return {"status": "ok", "version": version, "version_declared": "weight_version" in body}

    async def sleep(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ends all requests, whatever they are; a deeper sleep of a sleeper is none."""
        level = body.get("level", 1)
        if self.level:
            return {"status": "ok", "message": "Engine already sleeping"}
        await self._route(False)
        await self._pause("abort")
        self.level = level
        if level == 2:
            self.weights = "broken"
        return {"status": "ok", "message": f"Engine slept (level={level})"}

    async def wake_up(self, body: dict[str, Any]) -> dict[str, Any]:
        """Opens the engine; one that is woken in part counts itself as awake."""
        if not self.level:
            return {"status": "ok", "message": "Engine already awake"}
        if body.get("tags") is None:
            self.level = 0
        self._resume()
        await self._route(True)
        return {"status": "ok", "message": "Engine woke"}

    async def load_lora(self, body: dict[str, Any]) -> dict[str, Any]:
        name, uri = body.get("lora_name"), (body.get("source") or {}).get("uri")
        if not name or not uri:
            return _failed("'source.uri' is required and must be a string")
        told = {"status": "success", "lora_name": name, "hot_swap": False}
        if name in self.loras:
            number, _ = self.loras[name]
            text = f"LoRA adapter '{name}' already loaded"
            return {**told, "message": text, "lora_id": number}
        self._alive()
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "big") + 1
        self.loras[name] = (number, uri)
        return {**told, "message": f"LoRA adapter '{name}' loaded", "lora_id": number}

    async def unload_lora(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body.get("lora_name")
        if name not in self.loras:
            return _failed(f"LoRA adapter '{name}' not found. Available LoRAs: {list(self.loras)}")
        while any(one.lora == name for one in self.requests):
            await self._moved.wait()
        number, _ = self.loras.pop(name)
        text = f"LoRA adapter '{name}' unloaded successfully"
        return {"status": "success", "message": text, "lora_name": name, "lora_id": number}

    def listed(self) -> dict[str, Any]:
        loras = {name: number for name, (number, _) in self.loras.items()}
        return {"status": "success", "loras": loras, "count": len(loras)}

    # ---- Dynamo's sidecar of a vLLM that runs by itself ----

    def _sidecar(self) -> dict[str, Callback]:
        async def pause(body: Any) -> Any:
            await self._pause(body.get("mode", "abort"))
            return {"status": "paused"}

        async def resume(_: Any) -> Any:
            self._resume()
            return {"status": "resumed"}

        async def is_paused(_: Any) -> Any:
            self._alive()
            return {"is_paused": self.state != "open"}

        async def version(_: Any) -> Any:
            return {"weight_version": self.version or "default"}

        async def set_version(body: Any) -> Any:
            self.version = body["new_version"]
            return {"success": True, "new_version": self.version}

        def says(text: str) -> Callback:
            async def said(_: Any) -> Any:
                self._alive()
                return {"message": text}

            return said

        async def finish(body: Any) -> Any:
            self.version = body.get("weight_version") or self.version
            return {"message": "Weight update finished"}

        return {
            "control/pause_generation": pause,
            "control/resume_generation": resume,
            "control/is_paused": is_paused,
            "control/get_weight_version": version,
            "update/init_weight_transfer_engine": says("Weight transfer initialized"),
            "update/start_weight_update": says("Weight update started"),
            "update/update_weights": says("Weights updated"),
            "update/finish_weight_update": finish,
            "update/update_weight_version": set_version,
        }

    # ---- Dynamo's worker with SGLang in it ----

    def _sglang(self) -> dict[str, Callback]:
        async def pause(body: Any) -> Any:
            mode = _object(body).get("mode", "abort")
            if mode not in ("abort", "retract", "in_place"):
                raise ValueError(f"Invalid mode {mode}")
            await self._pause("abort" if mode == "abort" else "keep")
            return {"status": "ok"}

        async def go_on(body: Any) -> Any:
            _object(body)
            self._resume()
            return {"status": "ok"}

        async def update(body: Any) -> Any:
            try:
                self._load(_object(body)["model_path"], body.get("weight_version"))
            except RuntimeError as failed:
                return {"success": False, "message": str(failed), "num_paused_requests": 0}
            text = "Succeeded to update model weights."
            return {"success": True, "message": text, "num_paused_requests": 0}

        return {
            "pause_generation": pause,
            "continue_generation": go_on,
            "control/update_weights_from_disk": update,
        }

    # ---- Dynamo's worker with TensorRT-LLM in it ----

    def _trtllm(self) -> dict[str, Callback]:
        async def release(body: Any) -> Any:
            """It takes no new requests, waits for those that it has, and gives up in time."""
            if self.level:
                return {"status": "ok", "message": "Memory already released"}
            await self._route(False)
            self.state = "new"
            try:
                await asyncio.wait_for(self._pause("wait"), float(body.get("timeout_s", 30.0)))
            except TimeoutError:
                running = len(self.requests)
                self._resume()
                await self._route(True)
                return _failed(f"Timed out waiting for {running} in-flight request(s) to finish")
            self.level = 1
            return {"status": "ok", "message": "Memory released"}

        async def restore(body: Any) -> Any:
            if not self.level:
                return {"status": "ok", "message": "Memory already resumed"}
            self.level = 0
            self._resume()
            await self._route(True)
            return {"status": "ok", "message": "Memory resumed"}

        return {
            "control/release_memory_occupation": release,
            "control/resume_memory_occupation": restore,
        }


def _failed(message: str) -> dict[str, Any]:
    return {"status": "error", "message": message}


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ValueError("/engine/pause_generation requires a JSON object body")
    return body


def _told(route: Callback) -> Callback:
    """As these workers do: what is raised becomes an answer, with status 200."""

    async def told(body: Any) -> Any:
        body = {} if body is None else body
        if not isinstance(body, dict):
            return _NO_OBJECT
        try:
            return await route(body)
        except RuntimeError as failed:
            return _failed(str(failed))

    return told


async def _echo(body: Any) -> Any:
    return {"status": "ok", "body": body}


async def _error(_: Any) -> Any:
    return _failed("no")


async def _raises(_: Any) -> Any:
    raise RuntimeError("no: /srv/models")


async def _none(_: Any) -> Any:
    return None


ODD: dict[str, Callback] = {
    "odd/echo": _echo, "odd/error": _error, "odd/raises": _raises, "odd/none": _none,
}  # fmt: skip
