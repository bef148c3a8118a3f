"""What became of requests when an engine was paused."""

from __future__ import annotations

from app.domain.kinds import PauseMode
from app.enginekit.runtime import Conclusion
from app.sidecars.streams import Stream, over


async def paused(mode: PauseMode, mine: tuple[Stream, ...], in_flight: int) -> Conclusion:
    """`mine`: those that ran through the sidecar; the others of those `in_flight` clients had sent
    to the engine itself."""
    others = max(0, in_flight - len(mine))
    if mode is PauseMode.ABORT:
        await over(mine)
        return Conclusion(requests_aborted=sum(one.aborted for one in mine) + others)
    return Conclusion(requests_kept=len(mine) + others if mode is PauseMode.KEEP else 0)
