"""New weights from files, by a weight-transfer backend that reads them.

vLLM writes into the model that serves. From the start of an update to its finish there is no way
back: whatever goes wrong in between leaves weights that no request may meet, and only a whole good
update makes them right again. So everything that can be looked at is looked at before.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.domain.commands import UpdateWeights
from app.domain.kinds import CacheKind, CachePolicy, Component, WeightsState
from app.domain.operation import OperationWarning, Progress
from app.domain.weight_sources import DiskWeights
from app.enginekit.runtime import Conclusion, Flushed, Order, RankEvidence, RuntimeFault
from app.sidecars.answers import field_of
from app.sidecars.carried import Carried
from app.sidecars.checkpoints import Checkpoint, digest_of, folder_of, looked_at
from app.sidecars.faults import inconsistent, remaining_s, told
from app.sidecars.safetensors import BadWeights
from app.sidecars.vllm.answers import updated
from app.sidecars.vllm.engine import VllmEngine
from app.sidecars.vllm.memory_orders import OPENED_BRIEFLY
from app.sidecars.vllm.serving_orders import flush

_UNCHANGED = "(weights unchanged)"
_EMPTY = hashlib.sha256(b"").hexdigest()
_VACUOUS = OperationWarning(
    "EVIDENCE_VACUOUS",
    "the engine's checksums leave out some of its weights, so they prove nothing",
)


class Updating(Carried):
    """What all ways of an update have in common: begin, pieces in between, and the end."""

    def __init__(self, order: Order, command: UpdateWeights, engine: VllmEngine) -> None:
        super().__init__(order)
        self._command = command
        self._engine = engine
        self._draft = command.components == (Component.DRAFT,)
        self._before = engine.belief.weights
        self._unchanged = False
        self._size_bytes = 0
        self._opened = False
        self._evidence: tuple[RankEvidence, ...] = ()
        self._vacuous = False
        self._flushed: tuple[Flushed, ...] = ()

    async def prepare(self) -> None:
        if len(self._command.components) > 1:
            raise RuntimeFault(
                "ONE_COMPONENT", "update target and draft one by one", code="INVALID_ARGUMENT"
            )

    async def initialise(self, info: Mapping[str, Any]) -> None:
        await self._engine.post(
            "/init_weight_transfer_engine",
            body={"init_info": dict(info)},
            within_s=self._left_s,
        )

    async def begin(self) -> None:
        """From here on the weights are nobody's. Written down before it is so."""
        engine = self._engine
        engine.belief.may_start_update()
        if not await engine.is_paused():
            raise RuntimeFault(
                "NOT_PAUSED", "somebody else has resumed the engine", code="FAILED_PRECONDITION"
            )
        broken = engine.belief.weights is WeightsState.INCONSISTENT
        self.sent = True
        engine.believe(replace(engine.belief, weights=WeightsState.INCONSISTENT))
        path = "/start_draft_weight_update" if self._draft else "/start_weight_update"
        try:
            await engine.post(path)
        except RuntimeFault as fault:
            if not broken or fault.reason != "ENGINE_REFUSED":
                raise
            # An update that broke off may still be open: end it, whatever that says.
            try:
                await engine.post("/finish_weight_update")
            except RuntimeFault as left:
                if left.reason != "ENGINE_REFUSED":
                    raise
            await engine.post(path)

    async def piece(self, info: Mapping[str, Any]) -> None:
        try:
            answer = await self._engine.post(
                "/update_weights", body={"update_info": dict(info)}, within_s=self._left_s
            )
        except RuntimeFault as fault:
            self._unchanged = self.says_unchanged(fault)
            raise
        with told():
            updated(answer)

    def says_unchanged(self, fault: RuntimeFault) -> bool:
        """Whether a refusal proves that nothing was touched. Of vLLM's own backends none does."""
        del fault
        return False

    async def finish(self) -> None:
        engine, version = self._engine, self._command.weight_version
        await engine.post(
            "/finish_weight_update", body={"weight_version": version}, within_s=self._left_s
        )
        if await engine.read_version() != version:
            raise RuntimeFault("VERSION_NOT_SEEN", "the engine does not tell the new version")
        if self._command.cache_policy is CachePolicy.FLUSH:
            await flush(engine, CacheKind.PREFIX, recompute=True)
            self._flushed = (Flushed(CacheKind.PREFIX, 0, 0),)
        self._evidence = await self._checksums()
        engine.believe(replace(engine.belief, weights=WeightsState.VALID))
        for step in engine.belief.catch_up():
            self._opened = await engine.take(step) or self._opened

    async def undo(self) -> None:
        if self._unchanged:
            self._engine.believe(replace(self._engine.belief, weights=self._before))
            return
        raise inconsistent()

    async def conclude(self) -> Conclusion:
        warnings = [OPENED_BRIEFLY] if self._opened else []
        if self._vacuous:
            warnings.append(_VACUOUS)
        return Conclusion(evidence=self._evidence, flushed=self._flushed, warnings=tuple(warnings))

    @property
    def _left_s(self) -> float:
        return remaining_s(self.order.deadline_at)

    async def _checksums(self) -> tuple[RankEvidence, ...]:
        """Of every rank, or of none: on some devices the engine leaves out most of its weights."""
        engine = self._engine
        if not engine.found.has("/weight_checker"):
            return ()
        answer = await engine.post(
            "/weight_checker", body={"action": "checksum"}, within_s=self._left_s
        )
        with told():
            sums = field_of(answer, "checksums", dict)
        ranks = by_rank(
            sums, engine.found.tensor_parallel_size, engine.found.pipeline_parallel_size
        )
        self._vacuous = _EMPTY in sums.values()
        if self._vacuous or set(ranks) != set(range(engine.found.world_size)):
            return ()
        return tuple(
            RankEvidence(rank, len(found), self._size_bytes, digest_of(found))
            for rank, found in sorted(ranks.items())
        )


def by_rank(sums: Mapping[str, Any], tensor: int, pipeline: int) -> dict[int, dict[str, str]]:
    """Names come as `dp0:pp0:pcp0:tp1:name`. Others are no rank's, and left out."""
    found: dict[int, dict[str, str]] = {}
    for key, digest in sums.items():
        parts = key.split(":", 4)
        numbers = [part.lstrip("abcdefghijklmnopqrstuvwxyz") for part in parts[:4]]
        if len(parts) < 5 or not all(one.isdecimal() for one in numbers):
            continue
        dp, pp, _, tp = map(int, numbers)
        rank = dp * tensor * pipeline + pp * tensor + tp
        found.setdefault(rank, {})[parts[4]] = str(digest)
    return found


class CarriedFiles(Updating):
    """`disk`: the backend takes a whole checkpoint, and looks at it once more by itself. `file`:
    one that takes each file by its path."""

    def __init__(
        self, order: Order, command: UpdateWeights, engine: VllmEngine, source: DiskWeights
    ) -> None:
        super().__init__(order, command, engine)
        self._source = source
        self._checkpoint = Checkpoint(Path(source.path), ())

    async def prepare(self) -> None:
        await super().prepare()
        try:
            self._checkpoint = await asyncio.to_thread(self._look)
        except BadWeights as error:
            raise RuntimeFault("WEIGHTS_UNFIT", str(error), code="INVALID_ARGUMENT") from error
        self._size_bytes = self._checkpoint.size_bytes
        if not self._engine.initialised:
            await self.initialise({})
            self._engine.initialised = True

    def _look(self) -> Checkpoint:
        """Blocks on the disk. Raises BadWeights, RuntimeFault."""
        engine = self._engine
        return looked_at(
            self._source,
            engine.allowed,
            model=None if self._draft else folder_of(engine.found.root),
            check_finite=self._command.check_finite,
        )

    async def commit(self) -> None:
        await self.begin()
        infos = self._infos()
        for number, info in enumerate(infos):
            self.order.report(Progress("loading", number, len(infos), "pieces"))
            await self.piece(info)
        await self.finish()

    def says_unchanged(self, fault: RuntimeFault) -> bool:
        """The backend `disk` looks at a checkpoint before it touches the model, and says so; of
        several ranks another one may have gone on."""
        alone = self._engine.found.world_size == 1 and self._engine.found.transfer == "disk"
        return alone and fault.reason == "ENGINE_REFUSED" and fault.message.endswith(_UNCHANGED)

    def _infos(self) -> list[dict[str, Any]]:
        if self._engine.found.transfer == "file":
            return [{"path": str(file.path)} for file in self._checkpoint.files]
        info: dict[str, Any] = {"path": str(self._checkpoint.path)}
        if self._source.digests:
            info["files"] = {digest.name: digest.sha256 for digest in self._source.digests}
        if self._command.check_finite:
            info["check_finite"] = True
        return [info]
