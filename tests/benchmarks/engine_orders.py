"""What orders cost the reference engine: pause, update, release."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import load_file

from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import generation_pb2
from tests.benchmarks.checkpoints import LARGE, SMALL, checkpoint
from tests.benchmarks.engine_process import running
from tests.benchmarks.figures import Figure, megabytes, milliseconds, percentile
from tests.reference_engine.calling import Call, Clients, clients_of

STREAMS = 8
PAUSES = 60
UPDATES = 5
UPDATE_AIM = 1.3
RETURN_AIM = 0.95
WEIGHTS, KV_CACHE = pb.RESOURCE_KIND_WEIGHTS, pb.RESOURCE_KIND_KV_CACHE


async def figures(folder: Path) -> list[Figure]:
    large = [checkpoint(folder, LARGE, seed) for seed in (0, 1)]
    small = [checkpoint(folder, SMALL, seed) for seed in (0, 1)]
    found = []
    with running(folder / "pauses", "--tensor-parallel-size=2") as engine:
        async with clients_of(engine) as clients:
            found += await _pauses(clients)
    for ranks in (1, 2):
        name = f"updates-{ranks}"
        with running(folder / name, *_serving(large, ranks)) as engine:
            async with clients_of(engine) as clients:
                found.append(await _updates(clients, large, ranks))
    with running(folder / "stall", *_serving(small, 2)) as engine:
        async with clients_of(engine) as clients:
            found += await _stall(clients, small)
    with running(folder / "release", *_serving(large, 1), "--kv-blocks=4096") as engine:
        async with clients_of(engine) as clients:
            found.append(await _release(clients, tuple(engine.rank_pids)))
    return found


def _serving(versions: list[Path], ranks: int) -> list[str]:
    roots = [f"--weights-root={one}" for one in versions]
    return [f"--model={versions[0]}", *roots, f"--tensor-parallel-size={ranks}"]


# ---- pause ----

_PAUSE_HOW = (
    f"Over gRPC, {STREAMS} generations running on two ranks: from the call of a pause that keeps "
    "requests to its first event, which is written to the store before it is sent, and to its "
    f"completion, which every rank has acknowledged. {PAUSES} pauses."
)


async def _pauses(clients: Clients) -> list[Figure]:
    accepted, completed = [], []
    async with _Traffic(clients, STREAMS):
        for _ in range(PAUSES):
            began = time.perf_counter()
            told = clients.pause(pb.PAUSE_MODE_KEEP)
            await told.until("accepted")
            accepted.append(time.perf_counter() - began)
            await told.completed()
            completed.append(time.perf_counter() - began)
            await clients.resume()
            await asyncio.sleep(0.02)  # some steps between two pauses
    return [
        Figure(
            f"engine: pause to {what}, {STREAMS} streams, {name}",
            milliseconds(percentile(values, share)), how=_PAUSE_HOW,
        )
        for what, values in (("accepted", accepted), ("acknowledged by every rank", completed))
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]  # fmt: skip


class _Traffic:
    """So many generations at any time."""

    def __init__(self, clients: Clients, streams: int) -> None:
        self._clients = clients
        self._streams = streams
        self._calls: list[Call] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> _Traffic:
        first = [self._send() for _ in range(self._streams)]
        self._tasks = [asyncio.create_task(self._go_on(call)) for call in first]
        for call in first:
            await call.after(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        for call in self._calls:
            await call.hang_up()
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends

    def gaps(self, since: float, until: float) -> list[float]:
        """Between two tokens of one request, for those that came in that time."""
        return [
            later - earlier
            for call in self._calls
            for earlier, later in itertools.pairwise(call.heard.came_at)
            if since <= later and earlier <= until
        ]

    def _send(self) -> Call:
        request = generation_pb2.GenerateRequest(request_id=uuid4().hex)
        request.prompt = "the captain orders the helm hard to port"
        request.stopping.max_tokens = 400
        request.stopping.ignore_eos = True
        call = self._clients.send(request)
        self._calls.append(call)
        return call

    async def _go_on(self, call: Call) -> None:
        while True:
            heard = await call.whole()
            assert heard.finished is not None, heard
            call = self._send()


# ---- update ----

_UPDATE_HOW = (
    "From the call of `UpdateWeights` from disk, under a pause, without file digests, to its "
    "completion with the checksum of each rank; 120 million float32 parameters, the file in the "
    "page cache. Beside it, in one process: `safetensors.torch.load_file`, a copy of each tensor, "
    f"and one SHA-256 over the copies. Median of {UPDATES}, in turns."
)


async def _updates(clients: Clients, versions: list[Path], ranks: int) -> Figure:
    ours, bare = [], []
    await clients.pause(pb.PAUSE_MODE_KEEP).completed()
    for number in range(UPDATES + 1):
        path = versions[(number + 1) % 2]
        took = _bare(path)
        began = time.perf_counter()
        source = pb.DiskWeights(path=str(path))
        await clients.update(f"v{number}", disk=source, under_pause=pb.UnderPause()).completed()
        if number:  # the first fills the page cache
            bare.append(took)
            ours.append(time.perf_counter() - began)
    ratio = statistics.median(ours) / statistics.median(bare)
    size = sum(file.stat().st_size for file in versions[0].glob("*.safetensors"))
    alone = ranks == 1
    return Figure(
        f"update of {megabytes(size)} of weights from disk, {ranks} rank{'' if alone else 's'}",
        milliseconds(statistics.median(ours)),
        f"{milliseconds(statistics.median(bare))} (load, copy, SHA-256)", f"{ratio:.2f}",
        f"≤ {UPDATE_AIM}" if alone else "", not alone or ratio <= UPDATE_AIM, _UPDATE_HOW,
    )  # fmt: skip


def _bare(path: Path) -> float:
    began = time.perf_counter()
    copies = {
        name: one.clone() for name, one in load_file(path / "model.safetensors").items()
    }  # fmt: skip
    digest = hashlib.sha256()
    for one in copies.values():
        raw: Any = one.view(-1).numpy()
        digest.update(memoryview(raw).cast("B"))
    digest.hexdigest()
    return time.perf_counter() - began


_STALL_HOW = (
    f"{STREAMS} streams on two ranks, 24 million parameters; the longest time between two tokens "
    "of one stream while an update from disk pauses (keeping requests), commits and resumes by "
    "itself, beside the longest in as long a time after it. With the cache flushed each stream "
    f"computes its context again, which is part of it. Median of {UPDATES} updates."
)


async def _stall(clients: Clients, versions: list[Path]) -> list[Figure]:
    found = []
    for policy, name in ((pb.CACHE_POLICY_FLUSH, "flushed"), (pb.CACHE_POLICY_KEEP, "kept")):
        stalls, usual = [], []
        async with _Traffic(clients, STREAMS) as traffic:
            for number in range(UPDATES):
                path = versions[(number + 1) % 2]
                began = time.perf_counter()
                await clients.update(
                    f"{name}{number}",
                    disk=pb.DiskWeights(path=str(path)),
                    pause=pb.PauseAround(mode=pb.PAUSE_MODE_KEEP),
                    cache_policy=policy,
                ).completed()
                took = time.perf_counter() - began
                await asyncio.sleep(took + 0.5)
                now = time.perf_counter()
                stalls.append(max(traffic.gaps(began, began + took)))
                usual.append(max(traffic.gaps(now - took, now)))
        found.append(
            Figure(
                f"serving stall during an update, cache {name}",
                milliseconds(statistics.median(stalls)),
                f"{milliseconds(statistics.median(usual))} (without one)",
                f"{statistics.median(stalls) / statistics.median(usual):.1f}",
                how=_STALL_HOW,
            )
        )
    return found


# ---- release ----

_RELEASE_HOW = (
    "Weights and KV cache are released with DISCARD; what the rank's resident set shrinks by, as "
    "`/proc` says, beside the bytes that its tensors held. The engine had served before."
)


async def _release(clients: Clients, pids: tuple[int, ...]) -> Figure:
    await asyncio.gather(*(clients.generate(str(n), 100).whole() for n in range(STREAMS)))
    before = _resident(pids)
    released = clients.release(WEIGHTS, KV_CACHE, content=pb.CONTENT_POLICY_DISCARD)
    completed = await released.completed()
    returned = before - _resident(pids)
    held = sum(one.bytes_before for one in completed.release_resources.memory)
    return Figure(
        "memory returned by a release of weights and KV cache",
        megabytes(returned), f"{megabytes(held)} (held)", f"{returned / held:.2f}",
        f"≥ {RETURN_AIM}", returned / held >= RETURN_AIM, _RELEASE_HOW,
    )  # fmt: skip


def _resident(pids: tuple[int, ...]) -> int:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")
