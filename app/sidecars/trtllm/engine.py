"""One life of a TensorRT-LLM engine: its server, and its memory as last read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from app.enginekit.runtime import RuntimeFault
from app.sidecars.answers import field_of
from app.sidecars.faults import fault_of, remaining_s, told
from app.sidecars.http import Died, EngineHttp, NoAnswer, NotSent, Refused
from app.sidecars.trtllm.discovery import NOT_TAKEN, STATUS, Discovered
from app.sidecars.trtllm.memory import RUNNING, Memory, State, TagMap, memory_of

SIGNATURE_REFUSED = "SIGNATURE_REFUSED"
_LOOK_S = 0.2


class TrtllmEngine:
    """`gone`: no process was there, or the engine in it had ended, when it was last called. Who
    answers afterwards is another one: the server tells no identity by which it could be known.
    `only_way`: nobody reaches the engine but through this sidecar.
    """

    def __init__(
        self, http: EngineHttp, found: Discovered, tags: TagMap, *, only_way: bool = False
    ) -> None:
        self.http = http
        self.found = found
        self.tags = tags
        self.only_way = only_way
        self.memory = RUNNING
        self.gone = False

    async def read_memory(self) -> Memory:
        """Raises RuntimeFault."""
        self._same()
        with self._told():
            memory = memory_of(await self.http.read(STATUS))
        if self.memory.state is State.FAILED and memory.state is not State.FAILED:
            self.gone = True  # nothing mends it but another process
            self._same()
        self.memory = memory
        return memory

    async def settled(self, deadline_at: float) -> Memory:
        """Once it neither parks nor wakes, or as it is at the deadline. Raises RuntimeFault."""
        loop = asyncio.get_running_loop()
        while True:
            memory = await self.read_memory()
            if memory.settled or loop.time() + _LOOK_S >= deadline_at:
                return memory
            await asyncio.sleep(_LOOK_S)

    async def move(
        self, path: str, tags: frozenset[str], deadline_at: float, shows: Callable[[Memory], bool]
    ) -> None:
        """Park or wake `tags`. Sent once; what came of it is read, whether it was answered or not.
        Raises RuntimeFault; NothingDone where the engine has judged the call and not taken it."""
        body = {"tags": sorted(tags)}
        self._same()
        with self._told():
            try:
                answer = await self.http.post(path, body=body, within_s=remaining_s(deadline_at))
            except Died:
                raise
            except NoAnswer:
                memory = await self.settled(deadline_at)
                if memory.settled and shows(memory):
                    return
                raise
            said = field_of(answer, "status", str)
        if said != "success":
            raise RuntimeFault("NOT_CARRIED_OUT", "the engine does not say that it has done it")
        memory = await self.settled(deadline_at)
        if not (memory.settled and shows(memory)):
            raise RuntimeFault(
                "NOT_CARRIED_OUT", f"the engine says that it has done it, and is {memory.state}"
            )

    def _same(self) -> None:
        """An order is for the life of the engine that it was given to. Raises RuntimeFault."""
        if self.gone:
            raise RuntimeFault("ENGINE_RESTARTED", "the engine went away, and is another if back")

    @contextmanager
    def _told(self) -> Generator[None]:
        try:
            with told():
                yield
        except RuntimeFault as fault:
            cause = fault.__cause__
            if isinstance(cause, NotSent | Died):
                self.gone = True
            if isinstance(cause, Refused):
                raise _refusal(cause) from cause
            raise


class NothingDone(RuntimeFault):
    """The engine's own judgement, which it makes before it touches anything."""


def _refusal(cause: Refused) -> RuntimeFault:
    """What its workers say may come when they have begun."""
    match cause.status:
        case 401:
            return NothingDone(SIGNATURE_REFUSED, NOT_TAKEN, code="UNAVAILABLE")
        case 409:
            return NothingDone("ENGINE_REFUSED", cause.message, code="FAILED_PRECONDITION")
        case 400 | 404 | 405 | 422:
            return NothingDone("ENGINE_REFUSED", cause.message, code="INVALID_ARGUMENT")
    return fault_of(cause)
