"""A pause, a resume or a flush, between the kit's port and the ranks: nothing they hold changes."""

from __future__ import annotations

from collections.abc import Callable

from app.domain.commands import Command, FlushCaches, Pause, Resume
from app.domain.kinds import CacheKind, PauseMode
from app.enginekit.runtime import Conclusion, Flushed, RuntimeFault
from app.reference_engine import messages as m
from app.reference_engine.carried_change import fault_of
from app.reference_engine.channel import Issued
from app.reference_engine.engine import Engine
from app.reference_engine.errors import OrderRejected, RankLost

_PAUSED_ABORT = "the engine was paused, which ended all requests in flight"


class CarriedOrder:
    """One order's way through the ranks. The kit asks rank by rank, but the log has one entry for
    all ranks: the first rank asked about writes it. An order ends with the group that took it."""

    def __init__(
        self,
        operation_id: str,
        command: Command,
        engine: Engine,
        gate_before: m.Gate,
        on_gate: Callable[[m.Gate], None],
    ) -> None:
        """``on_gate`` is told what all ranks have done, at once and not in steps."""
        self.operation_id = operation_id
        self.group = engine.group
        self._command = command
        self._engine = engine
        self._gate_before = gate_before
        self._on_gate = on_gate
        self._issued: dict[str, Issued] = {}
        self._results: dict[int, m.Result] = {}

    async def prepare(self, rank: int) -> None:
        """Nothing has to be made ready; what can be found out beforehand is whether the rank takes
        orders at all."""
        await self._ask("prepare", m.ReadLoad, rank)

    async def commit(self, rank: int) -> None:
        self._results[rank] = await self._ask("commit", self._rank_order, rank)

    async def rollback(self, rank: int) -> None:
        """Back to the gate that stood before. A flushed cache stays flushed: it only costs time."""
        if "commit" in self._issued and not isinstance(self._command, FlushCaches):
            await self._ask("rollback", self._undo, rank)

    async def conclude(self) -> Conclusion:
        # The first rank schedules for all: its counts are theirs.
        match self._results[self.group.ranks[0]]:
            case m.PrefixFlushed() as flushed:
                counts = Flushed(CacheKind.PREFIX, flushed.blocks_freed, flushed.blocks_in_use)
                return Conclusion(changed=flushed.blocks_freed > 0, flushed=(counts,))
            case m.GateSet() as changed:
                self._check_group()
                self._on_gate(_gate_of(self._command))
                return Conclusion(
                    requests_aborted=changed.aborted,
                    requests_kept=changed.kept,
                    requests_continued=changed.continued,
                )
        raise RuntimeFault("INTERNAL", "a rank answered something else")

    def _check_group(self) -> None:
        """A group that is lost by now comes back with this gate, if it is not back already."""
        if self.group is self._engine.group:
            return
        try:
            self.group.check_whole()
        except RankLost as error:
            raise fault_of(error) from error

    async def _ask(self, phase: str, order: Callable[[], m.Order], rank: int) -> m.Result:
        if phase not in self._issued:
            self._issued[phase] = self.group.issue(order())
        try:
            return await self.group.ack(self._issued[phase], rank)
        except (RankLost, OrderRejected) as error:
            raise fault_of(error) from error

    def _undo(self) -> m.Order:
        return m.SetGate(gate=self._gate_before, message=_PAUSED_ABORT)

    def _rank_order(self) -> m.Order:
        match self._command:
            case FlushCaches():
                return m.FlushPrefixCache()
            case Pause(mode=mode):
                return m.SetGate(
                    gate=_gate_of(self._command),
                    message=_PAUSED_ABORT,
                    only_if_idle=mode is PauseMode.DRAIN,
                )
            case Resume():
                return m.SetGate(gate=m.Gate.OPEN)
        kind = self._command.kind.value
        raise RuntimeFault("UNSUPPORTED_OPERATION", f"{kind} is not offered")


def _gate_of(command: Command) -> m.Gate:
    if isinstance(command, Pause):
        return m.Gate.FROZEN if command.mode is PauseMode.KEEP else m.Gate.CLOSED
    return m.Gate.OPEN
