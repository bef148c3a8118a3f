"""One life of an engine: the server, what was found out about it, and what is believed of it."""

from __future__ import annotations

from dataclasses import replace

from app.domain.kinds import WeightsState
from app.enginekit.runtime import RuntimeFault
from app.sidecars.allowed import Allowed
from app.sidecars.answers import Answer, field_of
from app.sidecars.believing import Believing
from app.sidecars.faults import told
from app.sidecars.http import EngineHttp, Query
from app.sidecars.notes import Notes
from app.sidecars.vllm.answers import (
    Metrics,
    Sleeping,
    metrics_of,
    says_paused,
    weight_version,
)
from app.sidecars.vllm.belief import (
    Belief,
    ReleaseKv,
    Sleep,
    Step,
    Wake,
    first_belief,
)
from app.sidecars.vllm.discovery import Discovered

# Nobody is aborted and no cache emptied by an order that does not say so.
_KEEP_ALL: Query = (("mode", "keep"), ("clear_cache", "false"))


class VllmEngine(Believing[Belief]):
    """Lives on one event loop."""

    def __init__(
        self, http: EngineHttp, found: Discovered, allowed: Allowed, notes: Notes, belief: Belief
    ) -> None:
        super().__init__(notes, found.identity, belief)
        self.http = http
        self.found = found
        self.allowed = allowed
        self.version: str | None = None
        self.initialised = False  # the weight transfer of this life of the engine

    @classmethod
    async def attach(
        cls, http: EngineHttp, found: Discovered, allowed: Allowed, notes: Notes
    ) -> VllmEngine:
        """Take over from whoever had the engine before. Raises RuntimeFault, OSError; ValueError:
        the notes are damaged, and what they knew may matter."""
        document = notes.read()
        belief = None if document is None else Belief.of(document, found.identity)
        paused, sleep = False, None
        with told():
            if found.has("/is_paused"):
                paused = says_paused(await http.read("/is_paused"))
                sleep = metrics_of(await http.read("/metrics")).sleep
        if belief is None:
            belief = first_belief(paused=paused, sleep=sleep)
        engine = cls(http, found, allowed, notes, belief)
        if paused != (belief.paused is not None):
            engine.saw(paused=paused, sleep=sleep)
        notes.write(engine.belief.document(found.identity))
        await engine.read_version()
        return engine

    def saw(self, *, paused: bool, sleep: Sleeping | None) -> None:
        """Somebody else has paused, resumed, put to sleep or woken it: what can't be read is taken
        for the worst that fits. What is wrong with weights stays wrong. Raises RuntimeFault."""
        seen = first_belief(paused=paused, sleep=sleep)
        wrong = self.belief.weights is not WeightsState.VALID
        self.believe(replace(seen, weights=self.belief.weights) if wrong else seen)

    # ---- reading ----

    async def metrics(self) -> Metrics:
        """Raises RuntimeFault."""
        with told():
            return metrics_of(await self.http.read("/metrics"))

    async def is_paused(self) -> bool:
        """Raises RuntimeFault."""
        with told():
            return says_paused(await self.http.read("/is_paused"))

    async def read_version(self) -> str | None:
        """Raises RuntimeFault."""
        if self.found.has("/weight_info"):
            with told():
                self.version = weight_version(await self.http.read("/weight_info"))
        return self.version

    # ---- orders ----

    async def post(
        self, path: str, query: Query = (), *, body: object = None, within_s: float | None = None
    ) -> Answer:
        """An order is for the life of the engine that it was given to: what has taken its place
        meanwhile at the same address is not even sent the undoing of it. Raises RuntimeFault."""
        assert body is None or isinstance(body, dict)
        await self._same()
        with told():
            return await self.http.post(path, query, body=body, within_s=within_s)

    async def _same(self) -> None:
        known = self.found.identity.started_at
        if known is not None and (await self.metrics()).started_at != known:
            raise RuntimeFault("ENGINE_RESTARTED", "the engine was started anew")

    async def pause(self, mode: str, *, within_s: float | None = None) -> None:
        """Returns when it is seen to be paused: a wait that somebody resumes past it answers that
        it is, and it is not. Raises RuntimeFault."""
        query = (("mode", mode), ("clear_cache", "false"))
        await self.post("/pause", query, within_s=within_s)
        if not await self.is_paused():
            raise RuntimeFault("PAUSE_NOT_SEEN", "somebody else has resumed the engine meanwhile")

    async def freeze(self) -> None:
        """Closed again, whatever has slipped in meanwhile. Raises RuntimeFault."""
        await self.post("/pause", _KEEP_ALL)
        if not await self.is_paused():
            raise RuntimeFault("PAUSE_NOT_SEEN", "the engine does not stay paused")

    async def resume(self) -> None:
        """Raises RuntimeFault."""
        await self.post("/resume")
        if await self.is_paused():
            raise RuntimeFault("RESUME_NOT_SEEN", "somebody else has paused the engine meanwhile")

    async def take(self, step: Step) -> bool:
        """Whether the engine was open for a moment. Raises RuntimeFault."""
        before, after = self.belief, self.belief.after(step)
        opens = before.opens(step)
        match step:
            case Sleep(level=level):
                # Before it is asked for: an answer that is lost must not leave weights looking
                # valid that are gone.
                self.believe(after)
                query = (("level", str(level)), ("mode", "keep"))
                _says(await self.post("/sleep", query), "sleeping")
                shown = (await self.metrics()).sleep
                wanted = Sleeping.OFFLOADED if level == 1 else Sleeping.DISCARDED
                if shown not in (None, wanted):
                    raise RuntimeFault("SLEEP_NOT_SEEN", f"the engine shows as {shown.value}")
            case ReleaseKv():
                self.believe(after)
                _says(await self.post("/release_kv_cache_memory"), "kv_cache_released")
            case Wake(kinds=kinds):
                # One `tags` for each: a list in one is a tag that nobody has, and no error.
                tags = tuple(("tags", kind.value) for kind in sorted(kinds))
                try:
                    answer = await self.post("/wake_up", tags)
                finally:
                    # Without an answer, or with a refusal, it may be open all the same.
                    if opens:
                        await self.freeze()
                _says(answer, "awake" if opens else "sleeping")
                self.believe(after)
        return opens

    async def end_requests(self, engine_ids: list[str], within_s: float) -> None:
        """Raises CallError. Those of an earlier life are known to no other."""
        body = {"request_ids": engine_ids}
        await self.http.post("/abort_requests", body=body, within_s=within_s)

    async def wake_wholly(self) -> None:
        """Nothing is asleep and nobody is served. Also clears what a failed release leaves behind.
        Raises RuntimeFault."""
        answer = await self.post("/wake_up")
        await self.freeze()
        _says(answer, "awake")


def _says(answer: Answer, status: str) -> None:
    with told():
        said = field_of(answer, "status", str)
    if said != status:
        raise RuntimeFault("NOT_CARRIED_OUT", f"the engine says that it is {said}, not {status}")
