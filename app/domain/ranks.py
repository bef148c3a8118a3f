"""What each rank of an engine has said about an operation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RankState(StrEnum):
    PENDING = "pending"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RankReport:
    """`rank` is global: dp_rank * (tp * pp) + local rank."""

    rank: int
    state: RankState
    message: str = ""


def with_report(ranks: tuple[RankReport, ...], report: RankReport) -> tuple[RankReport, ...]:
    """The latest report of each rank, in rank order."""
    latest = {known.rank: known for known in ranks} | {report.rank: report}
    return tuple(latest[rank] for rank in sorted(latest))
