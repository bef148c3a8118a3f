"""The weights that a run may load, and what the engine makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from app.conformance.case import NotApplicable, NotGiven, NotPromised, expect
from app.conformance.client import brief, described, ends_with
from app.conformance.orders import named
from app.conformance.placing import Way
from app.conformance.record import Told
from app.conformance.tensors import Weights, WeightsUnreadable, read_weights
from app.rpc.openengine.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from app.conformance.trial import Trial

_COPY_BYTES = 1 << 30
_FRAME = 64 * 1024
_ANSWER_TOKENS = 16
Answer: TypeAlias = tuple[tuple[int, ...], str]
"""Token ids and text."""


class Stock:
    """Of one run."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._copy: Weights | None = None
        self._repeatable: bool | None = None

    # ---- what can be loaded ----

    @property
    def path(self) -> str:
        """As the engine sees it."""
        assert self._trial.options.weights is not None, "the case did not say that it needs it"
        return self._trial.options.weights

    @property
    def copy(self) -> Weights:
        """Raises NotApplicable for what is too large or cannot be read."""
        path = self._trial.options.weights_copy
        assert path is not None, "the case did not say that it needs it"
        if self._copy is None:
            try:
                self._copy = read_weights(path, at_most_bytes=_COPY_BYTES)
            except WeightsUnreadable as unreadable:
                raise NotApplicable(f"copy of the weights: {unreadable}") from unreadable
        return self._copy

    def require(self, way: Way) -> None:
        """Raises NotApplicable where the engine does not take weights in that way."""
        self._trial.require(pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS)
        if way.source not in self._trial.profile.weight_sources:
            raise NotPromised(f"the profile does not offer updates from {way.value}")
        if way is Way.INLINE:
            size = sum(len(tensor.data) for tensor in self.copy)
            limit = self._trial.profile.limits.max_message_bytes
            if size > limit - _FRAME:
                raise NotApplicable(f"weights of {size} bytes do not fit into one message")

    def ways(self) -> list[Way]:
        """Those in which the suite can hand over weights of its own making."""
        places = self._trial.options.places
        open_ = {
            Way.INLINE: True,
            Way.SHARED_MEMORY: places.shared_prefix is not None,
            Way.DISK: places.scratch is not None,
        }
        found = []
        for way in (way for way, there in open_.items() if there):
            try:
                self.require(way)
            except NotApplicable:
                continue
            found.append(way)
        return found

    def any_way(self) -> Way:
        """Raises NotApplicable."""
        ways = self.ways()
        if not ways:
            raise NotGiven(
                "weights of the suite's own making can be handed over neither inline nor through"
                " --shared-memory-prefix nor --scratch"
            )
        return ways[0]

    @contextmanager
    def order(
        self, way: Way, weights: Weights, *, cut: bool = False, **fields: Any
    ) -> Iterator[pb.UpdateWeightsRequest]:
        """Whatever becomes of it, the way back loads the weights that were given. Raises
        NotApplicable where they cannot be put there."""
        places = self._trial.options.places
        try:
            with places.put(way, weights, cut=cut) as source:
                self._trial.altered = True
                yield self._trial.orders.load(**source, **fields)
        except OSError as error:
            raise NotApplicable(f"weights cannot be put in place: {error}") from error

    # ---- what becomes of it ----

    async def loaded(self, request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResult:
        """Raises NotHeld when the update does not end as a successful one does. Without evidence
        of what it has read from disk it has to say that it is not verified."""
        client = self._trial.client
        before = await client.profile()
        completed = await client.completed(request)
        after = await client.profile()
        result = completed.update_weights
        for name, wanted, found in (
            ("version", request.weight_version, after.state.weights.version),
            ("told version", request.weight_version, result.weight_version),
            ("version before", before.state.weights.version, result.previous_weight_version),
            ("weights", pb.WEIGHTS_STATE_VALID, after.state.weights.state),
            ("admission", before.state.admission, after.state.admission),
        ):
            expect(wanted == found, f"{name} {wanted}", found)
        ranks = sorted(evidence.rank for evidence in result.evidence)
        wanted_ranks = list(range(after.world_size))
        unsure = completed.verification == pb.VERIFICATION_UNVERIFIED
        if request.HasField("disk") and unsure and not ranks:
            return result  # it says itself that it can't show what it has read
        expect(ranks == wanted_ranks, f"evidence of ranks {wanted_ranks}", ranks)
        whole = all(len(one.sha256) == 32 and one.tensors and one.bytes for one in result.evidence)
        expect(whole, "tensors, bytes and SHA-256 of each rank", brief(result))
        return result

    async def given(self) -> pb.UpdateWeightsResult:
        """Load the weights that were given, from disk."""
        self.require(Way.DISK)
        result = await self.loaded(self._trial.orders.update(self.path))
        self._trial.altered = False
        return result

    async def turned_away(self, request: pb.UpdateWeightsRequest) -> Told:
        """Refused or failed, and either way with the weights as they were. Raises NotHeld."""
        client = self._trial.client
        before = (await client.profile()).state
        told = await client.told(request)
        failed = told.refusal is not None or ends_with(told, "failed")
        expect(failed, "the update to be refused or to fail", described(told))
        after = (await client.profile()).state
        as_before = after.weights == before.weights
        expect(as_before, f"weights {brief(before.weights)}", brief(after.weights))
        expect(
            after.admission == before.admission,
            f"admission {named(pb.AdmissionState, before.admission)} as before",
            named(pb.AdmissionState, after.admission),
        )
        if told.events:
            harmless = (pb.FAILURE_EFFECT_NONE, pb.FAILURE_EFFECT_ROLLED_BACK)
            effect = told.events[-1].failed.effect
            expect(
                effect in harmless, "effect NONE or ROLLED_BACK", named(pb.FailureEffect, effect)
            )
        return told

    # ---- what answers ----

    async def answer(self) -> Answer:
        """To one question that is always the same. Raises NotApplicable for an engine that answers
        the same question differently each time, NotHeld when it does not answer."""
        first = await self._ask()
        if self._repeatable is None:
            self._repeatable = first == await self._ask()
        if not self._repeatable:
            raise NotApplicable("this engine answers the same question differently each time")
        return first

    async def _ask(self) -> Answer:
        asked = self._trial.traffic.ask(_ANSWER_TOKENS)
        await asked.over(self._trial.patience_s, "while admission is open")
        expect(asked.whole, "a request to be answered while admission is open", asked)
        return tuple(asked.ids), asked.text

    async def answers_as(self, before: Answer, when: str) -> None:
        """Raises NotHeld."""
        after = await self.answer()
        expect(after == before, f"the answer {before[1]!r} {when}", repr(after[1]))
