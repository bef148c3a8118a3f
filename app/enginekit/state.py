"""The engine's administrative state: what a profile reports and what orders are judged by."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from app.domain.facts import (
    EXTERNAL,
    EngineFacts,
    LoraFact,
    PauseFact,
    ProfileFact,
    WeightsFact,
)
from app.domain.kinds import (
    Admission,
    ContentPolicy,
    EngineRole,
    NewRequests,
    PauseMode,
    ResourceKind,
    WeightsState,
)
from app.domain.ranks import RankReport, RankState
from app.enginekit.admission import AdmissionGate
from app.enginekit.gate import NewRequestRule
from app.enginekit.journal import Journal
from app.enginekit.records import Change
from app.enginekit.refusals import OutOfService, StoreUnavailable
from app.enginekit.runtime import Observation, Runtime

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPause:
    """A pause that holds or is on its way. `epoch` 0: it has not taken effect."""

    mode: PauseMode
    rule: NewRequestRule
    epoch: int
    operation_id: str
    idempotency_key: str
    since: datetime

    def in_force(self, epoch: int, since: datetime) -> HeldPause:
        return replace(self, epoch=epoch, since=since)


class EngineState:
    """In memory what the runtime and the gate say; on disk, in the journal, what is counted.

    `changed` is called after each change, to keep health up to date.
    """

    def __init__(
        self,
        runtime: Runtime,
        gate: AdmissionGate,
        journal: Journal,
        *,
        instance_id: str,
        now: Callable[[], datetime],
        timeout_s: float,
        default_hold_limit_ms: int = 60_000,
    ) -> None:
        self._runtime = runtime
        self.now = now
        self._timeout_s = timeout_s
        self._default_hold_limit_ms = default_hold_limit_ms
        self.gate = gate
        self.journal = journal
        self.instance_id = instance_id
        self.pause: HeldPause | None = None
        self.coming: HeldPause | None = None
        self.profile: ProfileFact | None = None  # while it records or is written
        self._observation: Observation | None = None
        self._answers = False
        self._inconsistent: tuple[int, ...] = ()
        self._missing = False  # weights were discarded, and no update has brought others
        self._updating = False
        self._updates_since_flush = 0
        self._contents: dict[ResourceKind, ContentPolicy] = {}  # of what is released
        self._order_under_way = False
        self._moves = 0  # counts what makes an observation that is on its way an old one
        self.changed: Callable[[], None] = lambda: None

    # ---- reading ----

    @property
    def weights(self) -> WeightsFact:
        seen = self._observation
        version = seen.weights.version if seen else None
        return WeightsFact(version, self._weights_state(), self._updates_since_flush)

    def _weights_state(self) -> WeightsState:
        if self._updating:
            return WeightsState.UPDATING
        if self._inconsistent:
            return WeightsState.INCONSISTENT
        if self._missing:
            return WeightsState.MISSING
        if self._observation is None or not self._answers:
            return WeightsState.UNKNOWN
        return self._observation.weights.state

    @property
    def needs_all_weights(self) -> bool:
        """Whether only an update of every parameter makes the weights valid again."""
        bad = (WeightsState.MISSING, WeightsState.INCONSISTENT)
        return bool(self._inconsistent) or self._missing or self.observation.weights.state in bad

    def lora(self, name: str) -> LoraFact | None:
        return next((lora for lora in self.observation.loras if lora.name == name), None)

    @property
    def released(self) -> frozenset[ResourceKind]:
        return self.observation.released

    def would_release(self, kind: ResourceKind, content: ContentPolicy) -> bool:
        """Whether that changes anything. What was preserved can still be discarded."""
        if kind not in self.released:
            return True
        kept = self._contents.get(kind) is ContentPolicy.PRESERVE
        return kept and content is ContentPolicy.DISCARD

    @property
    def observation(self) -> Observation:
        return self._observation or Observation(weights=WeightsFact())

    @property
    def ranks(self) -> tuple[RankReport, ...]:
        """Those that are not well."""
        known = {report.rank: report for report in self.observation.ranks}
        for rank in self._inconsistent:
            known.setdefault(rank, RankReport(rank, RankState.UNKNOWN, "not rolled back"))
        return tuple(known[rank] for rank in sorted(known))

    def facts(self) -> EngineFacts:
        seen, counters = self.observation, self.journal.counters
        return EngineFacts(
            instance_id=self.instance_id,
            revision=counters.revision,
            admission=self._admission,
            pause=self._pause_fact(),
            pause_epoch=counters.pause_epoch,
            released=seen.released,
            release_epoch=counters.release_epoch,
            weights=self.weights,
            role=seen.role,
            profile=self.profile,
            loras=seen.loras,
            open_operations=tuple(r.operation.id for r in self.journal.open_operations()),
            observed_at=self.now(),
        )

    @property
    def _admission(self) -> Admission:
        """An engine that others pause and resume as well is asked; of a failed one nobody knows."""
        seen = self.observation
        failed = any(report.state is RankState.FAILED for report in seen.ranks)
        return Admission.UNKNOWN if seen.holding is not None and failed else self.gate.admission

    def _pause_fact(self) -> PauseFact | None:
        shown = self.shown_pause()
        if shown is None:
            return None
        return PauseFact(
            mode=shown.mode,
            epoch=shown.epoch,
            by=shown.operation_id,
            since=shown.since,
            new_requests=shown.rule.new_requests,
            hold_limit_ms=shown.rule.hold_limit_ms,
            requests_kept=self.frozen,
            requests_held=self.gate.held,
        )

    def shown_pause(self) -> HeldPause | None:
        """Of a drain the one on its way, else the one that holds."""
        return self.coming if self.gate.admission is Admission.DRAINING else self.pause

    @property
    def frozen(self) -> int:
        """Requests that a KEEP pause has frozen and whose callers still wait."""
        kept = self.pause is not None and self.pause.mode is PauseMode.KEEP
        return self.gate.in_flight if kept else 0

    # ---- the runtime's part ----

    async def refresh(self) -> None:
        """Ask the runtime; a difference to the last answer raises the revision.

        Never raises: a runtime that does not answer leaves weights unknown, and a store that
        can't be written leaves the difference for the next time.
        """
        moves = self._moves
        seen = await self.observe()
        if seen is None or moves != self._moves:
            return
        known = self._observation
        if known is not None and self._order_under_way:
            # What an order does is told by its end, all at once.
            seen = replace(known, ranks=seen.ranks)
        if seen == known and self._in_step(seen):
            return
        found = seen
        try:
            if known is None:
                self._take(found)
            else:
                await self.journal.raise_counters(
                    self._change_by(found),
                    lambda: self._take(found),
                    unless=lambda: moves != self._moves,
                )
        except StoreUnavailable:
            return

    async def observe(self) -> Observation | None:
        """None: no answer in time."""
        answers = False
        seen = None
        try:
            async with asyncio.timeout(self._timeout_s):
                seen = await self._runtime.observe()
            answers = True
        except TimeoutError:
            pass
        except Exception:
            if self._answers:
                log.exception("the runtime cannot be observed")
        if answers != self._answers:
            self._answers = answers
            self._settle()
        return seen

    def _take(self, seen: Observation) -> None:
        self._moves += 1  # others may have asked meanwhile: one difference is one revision
        self._adopt(seen)
        self._follow(seen)
        self._settle()

    def _change_by(self, seen: Observation) -> Change:
        paused = seen.holding is not None and seen.holding.mode is not None
        return Change(revision=True, pause_epoch=paused and self._at_rest(Admission.OPEN))

    def _at_rest(self, admission: Admission) -> bool:
        return not self._order_under_way and self.gate.admission is admission

    def _in_step(self, seen: Observation) -> bool:
        """An end of an order may have been observed after somebody else's pause or resume."""
        if seen.holding is None:
            return True
        held = seen.holding.mode is not None
        return not self._at_rest(Admission.OPEN if held else Admission.PAUSED)

    def _follow(self, seen: Observation) -> None:
        """Somebody has paused or resumed the engine past the kit. While an order is under way
        admission is the order's, and what was seen of it is the last thing known."""
        if seen.holding is None:
            return
        mode = seen.holding.mode
        if mode is not None and self._at_rest(Admission.OPEN):
            rule = NewRequestRule(NewRequests.HOLD, self._default_hold_limit_ms)
            self.gate.close(rule)
            self.gate.take_effect()
            epoch = self.journal.counters.pause_epoch
            self.pause = HeldPause(
                mode=mode,
                rule=rule,
                epoch=epoch,
                operation_id=EXTERNAL,
                idempotency_key="",
                since=self.now(),
            )
        elif mode is None and self._at_rest(Admission.PAUSED):
            self.pause = None
            self.gate.open()

    def _adopt(self, seen: Observation) -> None:
        """Ranks that were started anew have nothing of what earlier ones could not undo."""
        if self._observation is not None and seen.group != self._observation.group:
            self._inconsistent = ()
        self._observation = seen

    # ---- after a commit; synchronous, so that nothing is seen in between ----

    def pause_began(self, pause: HeldPause) -> None:
        self.coming = pause
        self.gate.drain(pause.rule)
        self._settle()

    def pause_took_effect(self, pause: HeldPause, seen: Observation | None) -> None:
        self.pause, self.coming = pause, None
        self.gate.take_effect()
        self._keep(seen)

    def pause_withdrawn(self) -> None:
        self.coming = None
        self.gate.withdraw()
        self._settle()

    def resumed(self, seen: Observation | None) -> None:
        self.pause = None
        self.gate.open()
        self._keep(seen)

    def order_began(self) -> None:
        self._order_under_way = True
        self._moves += 1

    def order_over(self) -> None:
        self._order_under_way = False
        self._moves += 1

    def update_began(self) -> None:
        self._updating = True
        self._settle()

    def update_failed(self) -> None:
        """Weights are what they were before, or inconsistent."""
        self._updating = False
        self._settle()

    def updated(self, version: str, updates_since_flush: int, seen: Observation | None) -> None:
        """Every rank has committed, which makes an end of what was wrong with the weights; what the
        runtime then says of them holds, but for the version, which is the one ordered."""
        self._updating = self._missing = False
        self._inconsistent = ()
        self._updates_since_flush = updates_since_flush
        after = seen or replace(self.observation, weights=WeightsFact(None, WeightsState.VALID))
        self._keep(replace(after, weights=replace(after.weights, version=version)))

    def flushed(self, seen: Observation | None, *, clean: bool) -> None:
        """`clean`: nothing is left of what earlier weights computed."""
        if clean:
            self._updates_since_flush = 0
        self._keep(seen)

    def took_release(
        self, kinds: tuple[ResourceKind, ...], content: ContentPolicy, seen: Observation | None
    ) -> None:
        self._contents |= dict.fromkeys(kinds, content)
        if content is ContentPolicy.DISCARD:
            self._missing = self._missing or ResourceKind.WEIGHTS in kinds
            if ResourceKind.KV_CACHE in kinds:
                self._updates_since_flush = 0
        after = self.released | set(kinds)
        self._keep(replace(seen or self.observation, released=after))

    def took_restore(self, kinds: tuple[ResourceKind, ...], seen: Observation | None) -> None:
        for kind in kinds:
            self._contents.pop(kind, None)
        after = self.released - set(kinds)
        self._keep(replace(seen or self.observation, released=after))

    def reconfigured(self, role: EngineRole, seen: Observation | None, *, clean: bool) -> None:
        """`clean`: as of a flush."""
        if clean:
            self._updates_since_flush = 0
        self._keep(replace(seen or self.observation, role=role))

    def lora_came(
        self, lora: LoraFact, evicted: tuple[LoraFact, ...], seen: Observation | None
    ) -> None:
        gone = {one.name for one in evicted}
        left = tuple(known for known in self.observation.loras if known.name not in gone)
        self._keep(seen or replace(self.observation, loras=(*left, lora)))

    def lora_went(self, name: str, seen: Observation | None) -> None:
        left = tuple(lora for lora in self.observation.loras if lora.name != name)
        self._keep(seen or replace(self.observation, loras=left))

    def profile_moved(self, profile: ProfileFact | None) -> None:
        self.profile = profile
        self.changed()

    def became_inconsistent(self, ranks: tuple[int, ...]) -> None:
        """Out of service. Nothing proves the ranks equal again but a full update of the weights,
        or that all of them were started anew."""
        self._inconsistent = ranks
        self._settle()

    def _keep(self, seen: Observation | None) -> None:
        # What an order changed was counted by the order.
        self._moves += 1
        if seen is not None:
            self._adopt(seen)
        self._settle()

    def _settle(self) -> None:
        self.gate.unfit = self._unfit()
        self.changed()

    def _unfit(self) -> OutOfService | None:
        state = self.weights.state
        # A runtime that does not answer for a moment may still generate; it says so if not.
        if state not in (WeightsState.VALID, WeightsState.UNKNOWN):
            return OutOfService("the engine is out of service until its weights are valid")
        if self.observation.released:
            return OutOfService("the engine is out of service until its resources are restored")
        return None
