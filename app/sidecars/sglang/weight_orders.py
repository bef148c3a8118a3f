"""New weights: what all ways of an update have in common, and those from files.

SGLang writes into the model that serves, undoes nothing, and ends with what does not fit. So all
that can be looked at is looked at before, and whatever goes wrong afterwards leaves weights that no
request may meet until a whole good update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from app.domain.commands import UpdateWeights
from app.domain.kinds import CachePolicy, Component, WeightsState
from app.domain.operation import OperationWarning
from app.domain.weight_sources import DiskWeights
from app.enginekit.runtime import Conclusion, Flushed, Order, RankEvidence, RuntimeFault
from app.sidecars.answers import Answer
from app.sidecars.carried import Carried
from app.sidecars.checkpoints import Checkpoint, digest_of, folder_of, looked_at
from app.sidecars.faults import inconsistent, refused, remaining_s, told
from app.sidecars.safetensors import BadWeights
from app.sidecars.sglang.answers import Checksums, checksums, succeeded
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.sglang.serving_orders import emptied

# Said of each data-parallel rank, and before anything is touched.
_UNTOUCHED = "Failed to get weights iterator"
_SAME_SUMS = OperationWarning(
    "CHECKSUMS_UNCHANGED",
    "the engine's checksums are those from before the update: the weights are the same, or were"
    " not taken",
)
_DRAFT_PREFIX = "draft."


def unfit(error: BadWeights) -> RuntimeFault:
    return RuntimeFault("WEIGHTS_UNFIT", str(error), code="INVALID_ARGUMENT")


class Updating(Carried):
    def __init__(self, order: Order, command: UpdateWeights, engine: SglangEngine) -> None:
        super().__init__(order)
        self.command = command
        self.engine = engine
        self.size_bytes = 0
        self._before = engine.belief
        self._sums: Mapping[int, Mapping[str, str]] = {}
        self._begun = False
        self._untouched = False
        self._evidence: tuple[RankEvidence, ...] = ()
        self._flushed: tuple[Flushed, ...] = ()
        self.unchanged = False

    @property
    def left_s(self) -> float:
        return remaining_s(self.order.deadline_at)

    @property
    def flushes(self) -> bool:
        return self.command.cache_policy is CachePolicy.FLUSH

    @property
    def component(self) -> Component:
        """The one that is updated."""
        return self.command.components[0] if self.command.components else Component.TARGET

    @property
    def model(self) -> Path:
        """Where what serves now came from, for comparison. Raises RuntimeFault."""
        engine = self.engine
        draft = self.component is Component.DRAFT
        root = (engine.found.draft_root or "") if draft else engine.belief.root
        found = folder_of(root)
        if found is None:
            raise refused(
                "MODEL_NOT_SEEN", "the files of the engine's model are not seen from here"
            )
        return found

    async def prepare(self) -> None:
        if len(self.command.components) > 1:
            raise RuntimeFault(
                "ONE_COMPONENT", "update target and draft one by one", code="INVALID_ARGUMENT"
            )
        await self.engine.same()

    async def closed(self) -> None:
        """Just before anything is sent: nobody is served, and nothing refers to KV that is to be
        dropped. Raises RuntimeFault."""
        engine = self.engine
        engine.belief.may_update()
        if await engine.ready():
            raise refused("NOT_PAUSED", "somebody else has resumed the engine")
        if self.flushes:
            # Frozen in place they would keep it, and the update would fail after it was done.
            await engine.put_back()
        self._sums = await self._read_sums()

    def doubt(self) -> None:
        """From here on the weights are nobody's. Raises RuntimeFault."""
        self.sent = self._begun = True
        self.engine.believe(replace(self.engine.belief, weights=WeightsState.INCONSISTENT))

    async def begin(self) -> None:
        """Raises RuntimeFault."""
        self.sent = True
        self._begun = await self.engine.begin(self.component.value)
        if not self._begun:
            raise RuntimeFault(
                "UPDATE_OPEN", "somebody else has begun an update", code="FAILED_PRECONDITION"
            )

    async def send(self, path: str, body: Mapping[str, object]) -> Answer:
        """Raises RuntimeFault."""
        try:
            answer = await self.engine.post(path, body=dict(body), within_s=self.left_s)
            with told():
                succeeded(answer)
        except RuntimeFault as fault:
            self._untouched = fault.reason == "ENGINE_REFUSED" and all(
                part.strip().startswith(_UNTOUCHED) for part in fault.message.split(" | ")
            )
            raise
        return answer

    async def complete(self) -> None:
        """All pieces are in the model. Raises RuntimeFault."""
        await self.engine.end(within_s=self.left_s)
        if self.flushes and not await self.engine.flush():
            raise RuntimeFault("CACHE_IN_USE", "the engine did not empty its cache")
        await self.send(
            "/update_weight_version",
            # By default it ends every request that runs.
            {"new_version": self.command.weight_version, "abort_all_requests": False},
        )
        await self.finish()

    async def finish(self) -> None:
        """All is sent: read back what can be. Raises RuntimeFault."""
        engine = self.engine
        if (await engine.read_model()).weight_version != self.command.weight_version:
            raise RuntimeFault("VERSION_NOT_SEEN", "the engine does not tell the new version")
        if self.flushes:
            self._flushed = emptied()
        after = await self._read_sums()
        self.unchanged = bool(after) and after == self._sums
        if set(after) == set(range(engine.found.world_size)):
            self._evidence = tuple(
                RankEvidence(rank, len(sums), self.size_bytes, digest_of(sums))
                for rank, sums in sorted(after.items())
            )
        engine.believe(replace(engine.belief, weights=WeightsState.VALID))

    async def undo(self) -> None:
        if self._untouched or not self._begun:
            belief = self.engine.belief
            self.engine.believe(replace(belief, weights=self._before.weights))
            return
        raise inconsistent()

    async def conclude(self) -> Conclusion:
        return Conclusion(
            evidence=self._evidence,
            flushed=self._flushed,
            warnings=(_SAME_SUMS,) if self.unchanged else (),
        )

    async def _read_sums(self) -> dict[int, dict[str, str]]:
        """By rank; of the component alone. Not of all ranks: none is told."""
        engine = self.engine
        if not engine.found.has("/weights_checker"):
            return {}
        draft = self.component is Component.DRAFT
        body = {"action": "checksum", "selector": self.component.value}
        with told():
            answer = await engine.http.post("/weights_checker", body=body, within_s=self.left_s)
            found = checksums(answer)
        kept: dict[int, dict[str, str]] = {}
        for one in found:
            names = {n: d for n, d in one.sums.items() if n.startswith(_DRAFT_PREFIX) is draft}
            if names:
                kept[self._rank(one)] = names
        return kept

    def _rank(self, one: Checksums) -> int:
        found = self.engine.found
        within = one.pp_rank * found.tensor_parallel_size + one.tp_rank
        if found.attention_parallel:
            return within
        return one.dp_rank * found.tensor_parallel_size * found.pipeline_parallel_size + within


class CarriedFiles(Updating):
    def __init__(
        self, order: Order, command: UpdateWeights, engine: SglangEngine, source: DiskWeights
    ) -> None:
        super().__init__(order, command, engine)
        self._source = source
        self._checkpoint: Checkpoint | None = None

    async def prepare(self) -> None:
        await super().prepare()
        self._checkpoint = await self._looked_at()
        if not await asyncio.to_thread(self._checkpoint.path.is_dir):
            # A name that is no folder would be looked up in a hub.
            raise RuntimeFault(
                "PATH_NOT_ALLOWED", "the path has to be that of a folder", code="INVALID_ARGUMENT"
            )
        self.size_bytes = self._checkpoint.size_bytes

    async def _looked_at(self) -> Checkpoint:
        """Raises RuntimeFault."""
        try:
            return await asyncio.to_thread(
                looked_at,
                self._source,
                self.engine.allowed,
                model=self.model,
                check_finite=self.command.check_finite,
            )
        except BadWeights as error:
            raise unfit(error) from error

    async def commit(self) -> None:
        assert self._checkpoint is not None
        # What was looked at may have been changed since.
        if await self._looked_at() != self._checkpoint:
            raise unfit(BadWeights("the weights were changed while they were looked at"))
        await self.closed()
        self.doubt()
        await self.send(
            "/update_weights_from_disk",
            {
                "model_path": str(self._checkpoint.path),
                "weight_version": self.command.weight_version,
                "flush_cache": self.flushes,
                "abort_all_requests": False,
            },
        )
        await self.finish()
