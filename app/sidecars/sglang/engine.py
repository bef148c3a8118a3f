"""One life of an engine: the server, what was found out about it, and what is believed of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from app.domain.kinds import PauseMode, ResourceKind, WeightsState
from app.domain.weight_sessions import NcclTransfer
from app.enginekit.runtime import RuntimeFault
from app.sidecars.allowed import Allowed
from app.sidecars.answers import Answer, served_models
from app.sidecars.believing import Believing
from app.sidecars.faults import refused, told
from app.sidecars.http import EngineHttp, NoAnswer, Query
from app.sidecars.notes import Notes
from app.sidecars.sglang.answers import (
    Loads,
    ModelInfo,
    acknowledged,
    loads,
    model_info,
    nothing,
    succeeded,
)
from app.sidecars.sglang.belief import TAGS, Belief, Hold, first_belief
from app.sidecars.sglang.discovery import Discovered, identity_of, server_info

# `/health` generates a token, and takes a second for it.
_HEALTH_S = 15.0
_FAILING_S = 1.0
_IDLE_S = 10.0


class SglangEngine(Believing[Belief]):
    """Lives on one event loop."""

    def __init__(
        self, http: EngineHttp, found: Discovered, allowed: Allowed, notes: Notes, belief: Belief
    ) -> None:
        super().__init__(notes, found.identity, belief)
        self.http = http
        self.found = found
        self.allowed = allowed
        self.version: str | None = None
        self.role = found.role
        # By what is written of a profile, or by a group that is not complete yet: for as long as it
        # takes the scheduler does nothing else.
        self.occupied = False
        self.group: NcclTransfer | None = None  # that it joined before any update, and is in

    @classmethod
    async def attach(
        cls,
        http: EngineHttp,
        found: Discovered,
        allowed: Allowed,
        notes: Notes,
        model_path: Path | None = None,
    ) -> SglangEngine:
        """Take over from whoever had the engine before. `model_path`: where its model is seen,
        if it does not say so itself. Raises RuntimeFault, OSError; ValueError: the notes are
        damaged, and what they knew may matter."""
        document = notes.read()
        belief = None if document is None else Belief.of(document, found.identity)
        with told():
            ready = (await http.get("/ready")).status == 200
        if belief is None:
            belief = first_belief(found, paused=False)
        if model_path is not None:
            belief = replace(belief, root=str(model_path))
        engine = cls(http, found, allowed, notes, belief)
        if not ready and belief.paused is None and not await engine.answers():
            belief = belief.paused_as(PauseMode.KEEP, Hold.IN_PLACE)
        elif ready and belief.paused is not None:
            belief = belief.open
        engine.belief = belief
        notes.write(belief.document(found.identity))
        await engine.read_model()
        return engine

    # ---- reading ----

    async def loads(self) -> Loads:
        """Raises RuntimeFault."""
        with told():
            return loads(await self.http.read("/v1/loads"))

    async def read_model(self) -> ModelInfo:
        """Raises RuntimeFault."""
        with told():
            found = model_info(await self.http.read("/model_info"))
        self.version = found.weight_version
        self.role = found.role
        return found

    async def ready(self) -> bool:
        """True: it is not paused. False: it is, or a probe of its health has failed since it last
        went well, or it is ending. Raises RuntimeFault."""
        with told():
            return (await self.http.get("/ready")).status == 200

    async def answers(self, within_s: float = _HEALTH_S) -> bool:
        """Whether it generates. Never asked of an engine that is believed to be paused: there the
        question hangs, and its failure is remembered. Raises RuntimeFault, also while it starts or
        ends, which it says at once: a probe that fails has waited a second at the least."""
        asked_at = asyncio.get_running_loop().time()
        with told():
            try:
                health = await self.http.get("/health", within_s=within_s)
            except NoAnswer:
                return False
        if health.status == 503 and asyncio.get_running_loop().time() - asked_at < _FAILING_S:
            raise RuntimeFault(
                "ENGINE_UNREACHABLE", "the engine is starting, or ending", retryable=True
            )
        return health.status == 200

    async def adapters(self) -> dict[str, str]:
        """Names and paths. Raises RuntimeFault."""
        with told():
            models = served_models(await self.http.read("/v1/models"))
        return {model.name: model.root for model in models if model.parent is not None}

    @property
    def held(self) -> bool:
        """Whether the scheduler stands still because it was told to."""
        return self.belief.hold in (Hold.RETRACT, Hold.IN_PLACE)

    # ---- orders ----

    async def post(
        self, path: str, query: Query = (), *, body: object = None, within_s: float | None = None
    ) -> Answer:
        """An order is for the life of the engine that it was given to, and for a scheduler that
        answers: one that is stuck takes orders too, and carries them out whenever it comes free.
        Raises RuntimeFault."""
        assert body is None or isinstance(body, dict)
        await self.same()
        with told():
            return await self.http.post(path, query, body=body, within_s=within_s)

    async def same(self) -> None:
        """Raises RuntimeFault: then nothing was sent."""
        patience = self.http.patience
        within_s = patience.control_s if self.occupied else patience.read_s
        with told():
            try:
                info = await server_info(self.http, within_s)
            except NoAnswer as error:
                raise RuntimeFault(
                    "SCHEDULER_SILENT",
                    "the engine's scheduler does not answer, so that nothing was ordered of it",
                    retryable=True,
                ) from error
            if identity_of(info) != self.found.identity:
                raise RuntimeFault("ENGINE_RESTARTED", "the engine was started anew")

    async def pause(self, hold: Hold, *, within_s: float | None = None) -> None:
        """Returns when it is seen not to be open. Raises RuntimeFault."""
        answer = await self.post("/pause_generation", body={"mode": hold.value}, within_s=within_s)
        with told():
            acknowledged(answer)
        if await self.ready():
            raise RuntimeFault("PAUSE_NOT_SEEN", "somebody else has resumed the engine meanwhile")

    async def put_back(self) -> None:
        """What is frozen goes back into the queue, so that nothing refers to its KV any more.
        Raises RuntimeFault."""
        if self.belief.hold is Hold.IN_PLACE:
            await self.pause(Hold.RETRACT)
            self.believe(replace(self.belief, hold=Hold.RETRACT))

    async def resume(self) -> None:
        """Returns when it is seen to be open: where a probe has failed under the pause, the server
        says that it is not ready until another one goes well. Raises RuntimeFault."""
        answer = await self.post("/continue_generation", body={})
        with told():
            acknowledged(answer)
        if not await self.ready() and not await self.answers():
            raise RuntimeFault("RESUME_NOT_SEEN", "the engine does not generate")

    async def flush(self) -> bool:
        """Whether its caches were emptied, which it does only while nothing runs; so this is the
        one proof that nothing does, of the first data-parallel rank. Raises RuntimeFault."""
        await self.same()
        with told():
            answer = await self.http.post_any("/flush_cache")
        if answer.status in (200, 400):
            return answer.status == 200
        raise RuntimeFault("ENGINE_REFUSED", f"the engine does not flush ({answer.status})")

    async def prove_idle(self) -> None:
        """Under a pause. Raises RuntimeFault."""
        give_up_at = asyncio.get_running_loop().time() + _IDLE_S
        await self.put_back()
        while not await self.flush():
            if asyncio.get_running_loop().time() >= give_up_at:
                raise refused("REQUESTS_RUNNING", "requests still run, and would lose their memory")
            await asyncio.sleep(0.5)
        many = self.found.data_parallel_size > 1
        if many and not self.held and (await self.loads()).in_flight:
            raise refused("REQUESTS_RUNNING", "requests run on some rank")

    async def release(self, kinds: frozenset[ResourceKind]) -> None:
        """Of an engine that was just proved to be idle. Tags are always named: without any the
        server takes all of them. Raises RuntimeFault."""
        self.belief.may_release(kinds)
        await self._memory("/release_memory_occupation", kinds, self.belief.released | kinds)

    async def restore(self, kinds: frozenset[ResourceKind]) -> None:
        """Raises RuntimeFault."""
        self.belief.may_restore(kinds)
        await self._memory("/resume_memory_occupation", kinds, self.belief.released - kinds)

    async def _memory(
        self, path: str, kinds: frozenset[ResourceKind], after: frozenset[ResourceKind]
    ) -> None:
        before = self.belief
        await self.same()
        self.believe(replace(before, released=before.released | kinds, doubtful=True))
        body = {"tags": sorted(TAGS[kind] for kind in kinds)}
        try:
            with told():
                answer = await self.http.post(path, body=body)
                nothing(answer)
        except RuntimeFault as fault:
            if fault.reason in ("ENGINE_REFUSED", "ENGINE_UNREACHABLE"):
                self.believe(before)  # it came to nothing
            raise
        self.believe(replace(before, released=after, doubtful=False))

    # ---- updates of weights ----

    async def begin(self, selector: str) -> bool:
        """From here on the weights are nobody's. False: an update of somebody else's is open, and
        nothing was changed. Raises RuntimeFault."""
        if self.belief.session:
            await self._end_whatever()
        before = self.belief
        self.believe(replace(before, session=True, weights=WeightsState.INCONSISTENT))
        try:
            answer = await self.post("/begin_weight_update", body={"selector": selector})
            with told():
                succeeded(answer)
        except RuntimeFault as fault:
            if fault.reason not in ("ENGINE_REFUSED", "SCHEDULER_SILENT"):
                raise
            self.believe(before)
            return False
        return True

    async def end(self, *, within_s: float) -> None:
        """Raises RuntimeFault."""
        answer = await self.post("/end_weight_update", body={}, within_s=within_s)
        with told():
            succeeded(answer)
        self.believe(replace(self.belief, session=False))

    async def _end_whatever(self) -> None:
        """Of an update that broke off: whether it is still open is not known. Raises
        RuntimeFault."""
        try:
            await self.post("/end_weight_update", body={})
        except RuntimeFault as fault:
            if fault.reason != "ENGINE_REFUSED":
                raise
        self.believe(replace(self.belief, session=False))

    async def end_requests(self, engine_ids: list[str], within_s: float) -> None:
        """Raises CallError. Those of an earlier life are known to no other."""
        for engine_id in engine_ids:
            await self.http.post("/abort_request", body={"rid": engine_id}, within_s=within_s)
