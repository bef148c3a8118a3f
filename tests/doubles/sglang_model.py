"""The state of an SGLang server, as it was recorded: what it does, what it says, and of what it
ends. Pure of HTTP; `sglang_http` puts the routes around it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import pickle
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TAGS = ("kv_cache", "weights", "cuda_graph")
MODES = ("abort", "in_place", "retract")
Form = tuple[str, tuple[int, ...]]


class Death(Exception):
    """Of the scheduler, and the whole server goes along."""


class No(Exception):
    """{"success": false, "message"}, with status 400."""


@dataclass(eq=False)
class Request:
    rid: str
    tokens: int
    prompt: str
    adapter: str | None = None
    runs: bool = False  # holds memory
    queued: bool = True
    aborted: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Snapshot:
    at: float
    running: int
    waiting: int


class Sglang:
    """`token_s`: between two tokens. `dp`: data-parallel ranks. `hang_s`: after which a probe of a
    paused engine fails. `members`: ports at which a trainer completes its group. While it is
    `starting`, probes are told so at once."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        token_s: float = 0.003,
        dp: int = 1,
        hang_s: float = 1.2,
        seed: int = 1,
        slots: int | None = None,
    ) -> None:
        self.token_s = token_s
        self.dp = dp
        self.hang_s = hang_s
        self.starting = False
        self.seed = seed
        self.slots = slots
        self.path = str(checkpoint)
        self.served_name = "tiny"
        self.forms = forms_of(checkpoint)
        self.sums = sums_of(checkpoint)
        self.version = "default"
        self.role = "null"
        self.front_paused = False
        self.held = False  # the scheduler stands still
        self.hold = ""
        self.healthy = True
        self.stuck = False
        self.members: set[int] = set()
        self.groups: set[str] = set()
        self.session = False
        self.offloaded: set[str] = set()
        self.requests: list[Request] = []
        self.loras: dict[str, str] = {}
        self.known_loras: dict[str, str] = {}
        self.profile: dict[str, Any] | None = None
        self.payloads: set[str] = set()
        self.lie_of_success = False  # weights are said to be taken, and are not
        self.second_rank_refuses = False
        self.dead = False
        self.cached = False
        self.last = Snapshot(time.time(), 0, 0)
        self._moved = asyncio.Event()

    # ---- the scheduler ----

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def answer(self) -> None:
        """Of whatever asks the scheduler."""
        if self.stuck:
            await asyncio.Event().wait()

    @property
    def snapshot(self) -> Snapshot:
        if not self.held and not self.stuck:
            running = sum(one.runs for one in self.requests)
            self.last = Snapshot(time.time(), running, len(self.admitted) - running)
        return self.last

    @property
    def admitted(self) -> list[Request]:
        return [one for one in self.requests if not one.queued]

    def idle(self) -> bool:
        running = any(one.runs for one in self.requests)
        return not running and (self.held or not self.admitted)

    async def stream(self, request: Request) -> AsyncIterator[int]:
        """Tokens, as the scheduler lets it. Ends early when it is aborted."""
        self.requests.append(request)
        try:
            while self.front_paused and not request.ended.is_set():
                await self._until_moved(request)
            request.queued = False
            made = 0
            while made < request.tokens and not request.ended.is_set():
                if self.held or self.stuck:
                    await self._until_moved(request)
                    continue
                request.runs = self.cached = True
                await asyncio.sleep(self.token_s)
                if not request.runs or request.ended.is_set():
                    continue  # put back into the queue, or ended meanwhile
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
        weights = hashlib.sha256(json.dumps(self.sums, sort_keys=True).encode()).hexdigest()
        said = f"{weights}/{request.adapter}/{request.prompt}/{number}"
        return int.from_bytes(hashlib.sha256(said.encode()).digest()[:2], "big")

    def abort(self, rid: str, *, everything: bool = False) -> None:
        """The front end knows ids exactly; the scheduler ends all that begin like them."""
        if not everything and not any(one.rid == rid for one in self.requests):
            return
        for one in list(self.requests):
            if one.queued or not (everything or one.rid.startswith(rid)):
                continue
            one.aborted = True
            if not (self.held and one.runs):  # frozen in place, it ends with its next step
                one.ended.set()
        self._wake()

    # ---- pause ----

    async def pause(self, mode: str) -> None:
        self.front_paused = True
        if mode != "abort":
            if not self.held:
                assert self.snapshot
            self.held, self.hold = True, mode
            if mode == "retract":
                for one in self.requests:
                    one.runs = False
        while mode == "abort":
            self.abort("", everything=True)
            if not self.admitted:
                break
            await asyncio.sleep(0.01)
        self._wake()

    def proceed(self) -> None:
        self.front_paused = self.held = False
        self.hold = ""
        for one in self.requests:
            if one.aborted:
                one.ended.set()
        self._wake()

    def flush(self) -> bool:
        if not self.idle():
            return False
        self.cached = False
        return True

    # ---- memory ----

    def release(self, tags: list[str] | None) -> None:
        if not self.idle():
            raise Death("release_memory_occupation should be called only when server is idle.")
        self.offloaded |= set(tags or TAGS)
        self.flush()

    def resume(self, tags: list[str] | None) -> None:
        for tag in tags or TAGS:
            if tag not in self.offloaded:
                raise Death(tag)
            self.offloaded.remove(tag)

    # ---- weights ----

    async def _uninterrupted(self) -> None:
        """An engine that is not paused lets requests finish first."""
        while not self.front_paused and self.requests:
            await self._moved.wait()

    async def update_from_disk(self, path: str, version: str | None, *, flush: bool) -> str:
        await self._uninterrupted()
        folder = Path(path)
        names = await asyncio.to_thread(lambda: [one.name for one in folder.glob("*")])
        if not await asyncio.to_thread(folder.is_dir):
            raise No(
                "Failed to get weights iterator: Repo id must be in the form 'repo_name' or "
                f"'namespace/repo_name': '{path}'. Use `repo_type` argument if needed.."
            )
        if not any(name.endswith(".safetensors") for name in names):
            raise No(
                f"Failed to get weights iterator: Cannot find any model weights with `{path}`."
            )
        try:
            forms = await asyncio.to_thread(forms_of, folder)
            sums = await asyncio.to_thread(sums_of, folder)
        except Exception as error:
            raise Death(str(error)) from error
        self._load({name: (form, sums[name]) for name, form in forms.items()})
        self.path = self.served_name = path
        said = "Succeeded to update model weights."
        self._flushed(flush)
        if version is not None:
            self.version = version
            said += f" Weight version updated to {version}."
        return said

    def _load(self, tensors: dict[str, tuple[Form, str]]) -> None:
        for name, (form, digest) in tensors.items():
            known = self.forms.get(name)
            if known is None:
                continue  # passed over, and called a success
            if known[1] != form[1]:
                raise Death(f"shape of {name}")
            if not self.lie_of_success:
                self.sums[name] = digest

    def _flushed(self, flush: bool) -> None:
        if flush and not self.flush():
            raise No(
                "Weights were updated, but the cache was not flushed because requests are still "
                "running or queued. Retract or finish them, then call /flush_cache."
            )

    def begin(self) -> None:
        if self.session:
            raise No("a weight-update session is already open; call end_weight_update() first")
        self.session = True

    def end(self) -> None:
        if not self.session:
            raise No("no weight-update session is open; call begin_weight_update() first")
        self.session = False

    def _in_session(self, name: str) -> None:
        if not self.session:
            raise No(f"{name} must run between begin_weight_update() and end_weight_update()")

    async def update_from_tensor(
        self, payloads: list[str], load_format: str | None, version: str | None, *, flush: bool
    ) -> str:
        await self._uninterrupted()
        self._in_session("update_weights_from_tensor")
        if not payloads:
            raise Death("no payload of this rank")
        # What a flattened bucket looks like inside is left out: it is read as a list of tensors.
        if load_format not in (None, "direct", "flattened_bucket"):
            raise Death(f"Unknown load_format={load_format}")
        try:
            tensors = tensors_in(payloads[0])
            shared = b"rebuild_storage_filename" in base64.b64decode(payloads[0])
        except Exception as error:
            raise Death(str(error)) from error
        if shared and payloads[0] in self.payloads:
            raise Death("its shared memory is gone")
        self.payloads.add(payloads[0])
        self._load(tensors)
        self._flushed(flush)
        return f"Success{self._named(version)}"

    def _named(self, version: str | None) -> str:
        if version is None:
            return ""
        self.version = version
        return f" Weight version updated to {version}."

    async def init_group(self, group: str, port: int, backend: str) -> str:
        if not group:
            raise Death("Group name cannot be empty")
        if group in self.groups:
            raise No(
                "Failed to initialize custom process group: The specified group name has already "
                "been created, please use a different group name."
            )
        if backend not in ("gloo", "nccl"):
            raise No(f"Failed to initialize custom process group: Unknown backend type {backend}.")
        if port not in self.members:
            self.stuck = True
            await self.answer()
        self.groups.add(group)
        return "Succeeded to initialize custom process group."

    def destroy_group(self, group: str) -> str:
        if group not in self.groups:
            raise No("The group to be destroyed does not exist.")
        self.groups.remove(group)
        return "Succeeded to destroy custom process group."

    async def update_from_group(self, body: dict[str, Any], *, flush: bool) -> str:
        await self._uninterrupted()
        self._in_session("update_weights_from_distributed")
        group = body.get("group_name", "weight_update_group")
        if group not in self.groups:
            raise No(
                f"Failed to receive weights: Group {group} not in {sorted(self.groups)}. Please "
                "call `init_weights_update_group` first."
            )
        for dtype in body["dtypes"]:
            if "." in dtype:
                raise No(f"Failed to receive weights: module 'torch' has no attribute '{dtype}'")
        rows = zip(body["names"], body["dtypes"], body["shapes"], strict=False)
        self._load(
            {
                name: ((dtype, tuple(shape)), _short(f"{group}/{name}"))
                for name, dtype, shape in rows
            }
        )
        self._flushed(flush)
        return f"Succeeded to update parameter online.{self._named(body.get('weight_version'))}"

    # ---- the rest ----

    def load_lora(self, name: str, path: str) -> None:
        if name in self.loras:
            raise No(f"Failed to load LoRA adapter {name} because it is already loaded")
        self.loras[name] = self.known_loras[name] = path
        if self.slots is not None and len(self.loras) > self.slots:
            del self.loras[next(iter(self.loras))]

    async def unload_lora(self, name: str) -> None:
        if name not in self.loras:
            raise No(
                f"LoRA with name {name} does not exist. Loaded LoRAs: odict_keys("
                f"{list(self.loras)})"
            )
        path = self.loras.pop(name)
        while any(one.adapter == path for one in self.requests):
            await self._moved.wait()

    def stop_profile(self) -> None:
        """Raises No: none is under way; Death: it cannot be written."""
        if self.profile is None:
            raise No("Profiling is not in progress. Call /start_profile first.")
        body, self.profile = self.profile, None
        folder = Path(body["output_dir"])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank in range(self.dp):
                more = f"-DP-{rank}" if self.dp > 1 else ""
                name = f"{body['profile_id']}-TP-0{more}.trace.json.gz"
                (folder / name).write_bytes(b"trace")
        except OSError as error:
            raise Death(str(error)) from error


# ---- files and payloads ----


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    content = data[8 + length :]
    if max((one["data_offsets"][1] for one in header.values()), default=0) > len(content):
        raise ValueError("incomplete")
    return header, content


def forms_of(folder: Path) -> dict[str, Form]:
    found: dict[str, Form] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, _ = _header(path)
        found |= {name: (one["dtype"], tuple(one["shape"])) for name, one in header.items()}
    return found


def sums_of(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, content = _header(path)
        for name, one in header.items():
            start, end = one["data_offsets"]
            found[name] = hashlib.sha256(content[start:end]).hexdigest()[:16]
    return found


class _Storages(pickle.Unpickler):
    """What is allowed in a payload, and nothing of it is torch's."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _content
        if (module, name) == ("torch._utils", "_rebuild_tensor"):
            return lambda storage, _offset, size, _stride: (storage, size)
        if module == "torch.multiprocessing.reductions":
            return _REDUCED[name]
        if module in ("torch", "torch.storage"):
            return tuple if name == "Size" else name
        raise RuntimeError(f"Blocked unsafe global ({module}.{name})")


_REDUCED: dict[str, Any] = {
    "rebuild_tensor": lambda _, storage, meta: (storage, meta[1]),
    "rebuild_typed_storage": lambda storage, dtype: (dtype, storage),
    "rebuild_storage_filename": lambda _, __, handle, ___: handle,
}


class _Names(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return name

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _content(saved: bytes) -> tuple[str, bytes]:
    file = io.BytesIO(saved)
    for _ in range(3):
        _Names(file).load()
    _, storage, _, _, count, _ = _Names(file).load()
    _Names(file).load()
    assert int.from_bytes(file.read(8), "little") == count
    return storage, file.read()


def tensors_in(payload: str) -> dict[str, tuple[Form, str]]:
    """Raises whatever comes of reading garbage."""
    found = _Storages(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    return {
        name: ((storage, tuple(size)), hashlib.sha256(_bytes(content)).hexdigest()[:16])
        for name, ((storage, content), size) in found
    }


def _bytes(content: bytes | str) -> bytes:
    """Of what lies in shared memory its name stands for it."""
    return content if isinstance(content, bytes) else content.encode()
