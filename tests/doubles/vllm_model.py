"""The state of a vLLM server, as it was recorded: what it does, what it says, and where it lies.

Pure of HTTP; `vllm_http` puts the routes around it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
TAGS = frozenset({"weights", "kv_cache"})
ENDED = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Failure(Exception):
    """A worker's error, or the engine's."""


class OutOfOrder(Failure):
    """The engine's own word, before any worker was asked."""

    def __init__(self, method: str, message: str) -> None:
        super().__init__(f"Call to {method} method failed: {message}")


class Dead(Failure):
    """The engine has ended."""

    def __init__(self) -> None:
        super().__init__(ENDED)


@dataclass(eq=False)
class Request:
    external_id: str
    adapter: str | None
    tokens: int
    prompt: str
    counted: bool = True  # among those that the gauges tell
    aborted: bool = False
    error: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Vllm:
    """`flavour` 32 or 33. `token_s`: between two tokens. `backend`: of weight transfer."""

    def __init__(
        self, weights: Path, *, flavour: int = 32, token_s: float = 0.003, backend: str = "disk"
    ) -> None:
        self.flavour = flavour
        self.token_s = token_s
        self.backend = backend
        self.started_at = 1_796_000_000.0
        self.pause_state = "open"  # or new, all
        self.mode: str | None = None
        self.asleep: set[str] = set()
        self.shown_sleep = "awake"
        self.requests: list[Request] = []
        self.weights_id = digest_of(weights)
        self.tensors = tensors_of(weights)
        self.broken = False  # taken apart, and not put together again
        self.session = False
        self.initialised = False
        self.version = "default"
        self.loras: dict[str, str] = {}
        self.profiling = False
        self.vacuous = False
        self.on_cpu = False
        self.data_parallel_size = 1
        self.dead = False
        self.died = asyncio.Event()
        self._moved = asyncio.Event()
        self.update_delay_s = 0.0
        self.update_error: str | None = None
        self.lie_of_success = False  # updates answer that they are done, and are not

    # ---- life ----

    def die(self) -> None:
        self.dead = True
        self.died.set()
        for request in self.requests:
            request.error = ENDED
            request.ended.set()
        self._wake()

    def alive(self) -> None:
        if self.dead:
            raise Dead

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    # ---- requests ----

    @property
    def counted(self) -> list[Request]:
        return [one for one in self.requests if one.counted]

    async def stream(self, request: Request) -> AsyncIterator[int]:
        """Tokens, as the scheduler lets it. Ends early when it is aborted."""
        request.counted = self.pause_state == "open"
        self.requests.append(request)
        try:
            made = 0
            while made < request.tokens and not request.ended.is_set():
                stands = self.pause_state == "all" or (
                    self.pause_state == "new" and not request.counted
                )
                if stands:
                    await self._until_moved(request)
                    continue
                request.counted = True
                if self.broken or self.asleep:
                    # A step on memory that is not there, or on parameters without content.
                    self.die()
                    break
                await asyncio.sleep(self.token_s)
                if self.pause_state == "all" or request.ended.is_set():
                    continue
                made += 1
                yield self.token(request, made)
        finally:
            self.requests.remove(request)
            self._wake()

    async def _until_moved(self, request: Request) -> None:
        moved = asyncio.ensure_future(self._moved.wait())
        ended = asyncio.ensure_future(request.ended.wait())
        await asyncio.wait({moved, ended}, return_when=asyncio.FIRST_COMPLETED)
        moved.cancel()
        ended.cancel()

    def token(self, request: Request, number: int) -> int:
        """Of these weights and this adapter, for this prompt."""
        said = f"{self.weights_id}/{request.adapter}/{request.prompt}/{number}"
        return int.from_bytes(hashlib.sha256(said.encode()).digest()[:2], "big")

    def abort(self, request: Request) -> None:
        request.aborted = True
        request.ended.set()
        self._wake()

    def abort_ids(self, ids: list[Any]) -> int:
        """The number that was asked for, whatever became of them."""
        if not ids:
            found = list(self.requests)
            for request in found:
                self.abort(request)
            return len(found)
        for request in list(self.requests):
            if request.external_id in ids:
                self.abort(request)
        return len(ids)

    # ---- pause and sleep ----

    async def pause(self, mode: str) -> None:
        self.alive()
        frozen = self.pause_state == "all" and any(self.counted)
        if mode == "abort":
            for request in self.counted:
                self.abort(request)
        if not (mode == "wait" and frozen):  # nothing thaws what was frozen
            self.pause_state = "all" if mode == "keep" else "new"
        self.mode = mode
        self._wake()
        if mode == "keep" or frozen:
            return
        while any(self.counted) and not self.dead:
            await self._moved.wait()
        self.alive()

    def resume(self) -> None:
        self.alive()
        self.pause_state, self.mode = "open", None
        self._wake()

    @property
    def turns_away(self) -> bool:
        return self.flavour >= 33 and self.mode in ("abort", "wait")

    async def sleep(self, level: int, mode: str) -> None:
        await self.pause(mode)
        names = {0: "none", 1: "weights_offloaded", 2: "discard_all"}
        self.shown_sleep = names[level]  # also where nothing deeper is done
        if level and not self.asleep:
            self.asleep = set(TAGS)
            if level == 2:
                self.weights_id = "nothing"

    def wake_up(self, tags: list[str] | None) -> bool:
        self.alive()
        if tags is None:
            self.asleep.clear()
        elif [tag for tag in tags if tag != "scheduling"]:
            self.asleep -= set(tags)
        if self.asleep:
            return False
        self.shown_sleep = "awake"
        self.resume()
        return True

    def release_kv(self) -> None:
        self.alive()
        method = "release_kv_cache_memory"
        if self.pause_state == "open" or any(self.counted):
            raise OutOfOrder(method, f"{method}() requires a completed pause first")
        if self.asleep:
            raise OutOfOrder(method, f"{method}() requires all executor memory to be resident")
        self.asleep = {"kv_cache"}
        if self.on_cpu:
            raise Failure("Selective discard is not supported on CPU.")
        self.shown_sleep = "none"

    def reset_prefix_cache(self, *, forced: bool) -> bool:
        self.alive()
        return forced or not any(self.counted)

    # ---- weights ----

    def start_update(self) -> None:
        self.alive()
        if self.session:
            raise Failure("start_weight_update was called while an update is in progress.")
        self.session = True
        self.broken = self.backend != "disk"
        self._wake()

    async def update(self, info: Any) -> None:
        self.alive()
        if not self.session:
            raise Failure("start_weight_update must be called before update_weights.")
        await asyncio.sleep(self.update_delay_s)
        self.alive()
        try:
            if self.update_error is not None:
                raise Failure(self.update_error)
            if not self.initialised:
                raise Failure("weight transfer not initialized.")
            if not self.lie_of_success:
                self._load(info)
        except Failure:
            self.session = False  # it is closed by the error
            self.broken = True
            raise

    def _load(self, info: Any) -> None:
        if self.backend == "nccl":
            said = json.dumps([info["names"], info["dtype_names"], info["shapes"]])
            self.weights_id = hashlib.sha256(said.encode()).hexdigest()
            return
        path = Path(info["path"])
        if not path.exists():
            raise Failure(f"No such file or directory: {path}")
        self.weights_id, self.tensors = digest_of(path), tensors_of(path)

    def finish_update(self, version: str | None) -> None:
        self.alive()
        if not self.session:
            raise Failure("finish_weight_update called without a matching start_weight_update.")
        self.session = self.broken = False
        if version is not None and not self.lie_of_success:
            self.version = version

    def checksums(self) -> dict[str, str]:
        self.alive()
        return {
            f"dp{dp}:pp0:pcp0:tp0:{name}": EMPTY_SHA256
            if self.vacuous
            else hashlib.sha256(f"{self.weights_id}/{name}".encode()).hexdigest()
            for dp in range(self.data_parallel_size)
            for name in self.tensors
        }


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def digest_of(path: Path) -> str:
    found = hashlib.sha256()
    for file in files_of(path):
        found.update(file.read_bytes())
    return found.hexdigest()


def tensors_of(path: Path) -> list[str]:
    names: list[str] = []
    for file in files_of(path):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        names += json.loads(data[8 : 8 + length])
    return sorted(name for name in names if name != "__metadata__")
