"""Clients of vLLM's administrative endpoints, as they are: the order and the shapes of their calls,
what they check of an answer and what they don't.

    async with httpx2.AsyncClient(base_url="http://…/", headers=…) as http:
        await trl(Wire(http), [Step("v1", {"path": "/weights/v1"})])

Whatever stands behind the base URL is the same to them. `Wire(http, times=3)` sends every call that
changes something three times, as a client does that gives up on an answer which was on its way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2


@dataclass
class Wire:
    """`http` has the base URL, with a slash at its end, and the headers of every call. `statuses`:
    of all answers, in order."""

    http: httpx2.AsyncClient
    times: int = 1
    statuses: list[int] = field(default_factory=list)

    async def post(self, path: str, body: Any = None) -> httpx2.Response:
        """The last answer."""
        sent = {} if body is None else {"json": body}
        answers = [await self.http.post(path, **sent) for _ in range(self.times)]
        self.statuses += [answer.status_code for answer in answers]
        return answers[-1]

    async def get(self, path: str, body: Any = None) -> httpx2.Response:
        sent = {} if body is None else {"json": body}
        answer = await self.http.request("GET", path, **sent)
        self.statuses.append(answer.status_code)
        return answer

    async def checked(self, path: str, body: Any = None) -> httpx2.Response:
        return (await self.post(path, body)).raise_for_status()


@dataclass(frozen=True)
class Step:
    """One exchange of weights: the pieces that its trainer sends, and what it calls them."""

    version: str | None
    pieces: Sequence[Mapping[str, Any]]


async def trl(wire: Wire, steps: Sequence[Step], init_info: Mapping[str, Any] | None = None) -> int:
    """TRL's asynchronous GRPO. It looks at no status of what it posts. The world size."""
    size = (await wire.get("get_world_size")).raise_for_status().json()["world_size"]
    await wire.post("init_weight_transfer_engine", {"init_info": init_info or {}})
    for step in steps:
        await wire.post("pause?mode=keep")
        await wire.post("start_weight_update", {"is_checkpoint_format": True})
        for piece in step.pieces:
            await wire.post("update_weights", {"update_info": piece})
        named = None if step.version is None else {"weight_version": step.version}
        await wire.post("finish_weight_update", named)
        await wire.post("resume")
    return int(size)


async def skyrl(wire: Wire) -> None:
    """SkyRL with the engine on its own machine: memory given up while it trains. It raises on every
    answer but 2xx."""
    (await wire.get("get_world_size", {})).raise_for_status()
    await wire.checked("pause?mode=keep&clear_cache=false")
    await wire.checked("reset_prefix_cache", {"reset_running_requests": True})
    await wire.checked("resume")
    await wire.checked("sleep?level=1&tags=weights")
    await wire.checked("wake_up?tags=weights")
    await wire.checked("wake_up?tags=kv_cache")


async def skyrl_by_method(wire: Wire) -> httpx2.Response:
    """How it begins an exchange of weights: a method of its own in the engine's processes."""
    call = {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}}
    return await wire.post("collective_rpc", call)


async def prime_rl(wire: Wire, step: Step) -> None:
    """prime-rl's client around an update, whose own call its server alone has: it resumes whatever
    became of that, and tries again on 5xx."""
    await _again(wire, "pause?mode=keep&clear_cache=false")
    try:
        await wire.checked("start_weight_update")
        for piece in step.pieces:
            await wire.checked("update_weights", {"update_info": piece})
        await wire.checked("finish_weight_update", {"weight_version": step.version})
    finally:
        await _again(wire, "resume")


async def _again(wire: Wire, path: str, body: Any = None, tries: int = 10) -> None:
    for _ in range(tries):
        answer = await wire.post(path, body)
        if answer.status_code < 500:
            answer.raise_for_status()
            return
    answer.raise_for_status()


async def fast_model_actuation(wire: Wire) -> list[bool]:
    """llm-d's controller of pairs of pods: asleep and awake again, without a parameter, bodies
    ignored. What `is_sleeping` said after each."""
    told = []
    for path in ("sleep", "wake_up"):
        await wire.checked(path)
        answer = (await wire.get("is_sleeping")).raise_for_status()
        told.append(bool(answer.json()["is_sleeping"]))
    return told


async def colocated(wire: Wire, step: Step) -> list[str]:
    """A trainer on the engine's own devices, as SkyRL and verl do it: all memory given up while it
    trains, weights taken back first and filled, then the cache. What each wake-up answered."""
    await wire.checked("sleep?level=2")
    told = [(await wire.checked("wake_up?tags=weights")).json()["status"]]
    await wire.checked("start_weight_update")
    for piece in step.pieces:
        await wire.checked("update_weights", {"update_info": piece})
    await wire.checked("finish_weight_update", {"weight_version": step.version})
    told.append((await wire.checked("wake_up?tags=kv_cache")).json()["status"])
    return told


async def prime_rl_by_dynamo(workers: Sequence[Wire], step: Step) -> None:
    """prime-rl with Dynamo's sidecars: every call to all workers, by the system server of each. It
    goes on when all say that they are paused, and resumes whatever came of it."""
    for wire in workers:
        await _again(wire, "engine/control/pause_generation", _KEEP)
    try:
        for wire in workers:
            told = (await wire.get("engine/control/is_paused")).raise_for_status().json()
            assert told["is_paused"] is True
        for wire in workers:
            await wire.checked("engine/update/start_weight_update", {})
            for piece in step.pieces:
                await wire.checked("engine/update/update_weights", {"update_info": piece})
            named = {"weight_version": step.version}
            await wire.checked("engine/update/finish_weight_update", named)
    finally:
        for wire in workers:
            await _again(wire, "engine/control/resume_generation", {})


_KEEP = {"mode": "keep", "clear_cache": False}


async def prime_rl_adapter_by_dynamo(admin: Wire, system: Wire, name: str, uri: str) -> None:
    """prime-rl with workers that Dynamo's discovery named: pauses by the address of administration,
    the adapter by the worker's system server. It is tried again on 404 and 500."""
    await _again(admin, "pause?mode=keep&clear_cache=false")
    try:
        body = {"lora_name": name, "source": {"uri": uri}, "load_inplace": True}
        answer = await system.post("v1/loras", body)
        for _ in range(9):
            if answer.status_code not in (404, 500):
                break
            answer = await system.post("v1/loras", body)
        assert answer.raise_for_status().json().get("status") != "error", answer.text
    finally:
        await _again(admin, "resume")
