"""llm-d's fast model actuation, as it is: a launcher that has engines on one machine, and the
controller of pairs of pods, which puts them to sleep and wakes them.

    controller = Controller(launcher)
    await controller.bind("llm")        # made, or found asleep and woken
    await controller.unbind("llm")      # put to sleep
    controller.restart()                # it knows of nothing any more

The controller talks to the launcher of instances, and to each engine by vLLM's own endpoints, with
30 s for an answer, no body, no parameter and no token of its own. It takes any 2xx, and of
`is_sleeping` it reads one field; where that cannot be had it tries again later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx2

LIMIT_S = 30.0


class Later(Exception):
    """It did not go, and will be tried again."""


@dataclass
class Launcher:
    """`make` starts an engine, and returns a client of it."""

    make: Callable[[str], Awaitable[httpx2.AsyncClient]]
    instances: dict[str, httpx2.AsyncClient] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)

    async def create(self, instance: str) -> int:
        """PUT /v2/vllm/instances/{id}"""
        if instance in self.instances:
            return 409
        self.instances[instance] = await self.make(instance)
        return 201

    def delete(self, instance: str) -> int:
        """DELETE /v2/vllm/instances/{id}"""
        if self.instances.pop(instance, None) is None:
            return 404
        self.deleted.append(instance)
        return 200


@dataclass
class Controller:
    """`sleeping`: what it believes of each instance; an instance that is missing, nothing.
    `ready`: which it has told to be ready."""

    launcher: Launcher
    sleeping: dict[str, bool] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)

    def restart(self) -> None:
        self.sleeping.clear()

    async def bind(self, instance: str) -> None:
        """Raises Later."""
        if instance not in self.launcher.instances:
            assert await self.launcher.create(instance) == 201
        if instance not in self.sleeping:
            self.sleeping[instance] = await self.is_sleeping(instance)
        if self.sleeping[instance]:
            await self._post(instance, "wake_up")
            self.sleeping[instance] = False
        self.ready.add(instance)

    async def unbind(self, instance: str) -> None:
        """Raises Later."""
        self.ready.discard(instance)
        if not self.sleeping.get(instance, False):
            await self._post(instance, "sleep")
            self.sleeping[instance] = True

    async def collect(self, obsolete: str) -> bool:
        """Whether an instance of an earlier configuration went: only one that sleeps does."""
        try:
            asleep = await self.is_sleeping(obsolete)
        except Later:
            return False
        return asleep and self.launcher.delete(obsolete) == 200

    async def is_sleeping(self, instance: str) -> bool:
        """Raises Later."""
        answer = await self._do(instance, "GET", "is_sleeping", {"Accept": "application/json"})
        try:
            return bool(answer.json()["is_sleeping"])
        except (ValueError, KeyError, TypeError) as wrong:
            raise Later("the answer cannot be decoded") from wrong

    async def _post(self, instance: str, path: str) -> None:
        await self._do(instance, "POST", path, {})

    async def _do(
        self, instance: str, method: str, path: str, headers: dict[str, str]
    ) -> httpx2.Response:
        engine = self.launcher.instances[instance]
        try:
            answer = await engine.request(method, path, headers=headers, timeout=LIMIT_S)
        except httpx2.TransportError as broken:
            raise Later(str(broken)) from broken
        if not 200 <= answer.status_code < 300:
            raise Later(f"status {answer.status_code}")
        return answer
