"""Every case, in the order in which they are run."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from app.conformance.case import Case
from app.conformance.cases import (
    aborting,
    adapters,
    attaching,
    busy,
    cache_events,
    credentials,
    damaged_weights,
    fencing,
    health,
    listeners,
    operations,
    pausing,
    profile,
    profiling,
    ranks,
    refusals,
    releasing,
    resources,
    restarting,
    retries,
    serving,
    sessions,
    unsupported,
    update_admission,
    weights,
    whole_run,
)


def catalogue() -> tuple[Case, ...]:
    """Reads and refusals first; what breaks ranks late; what judges the whole run last."""
    return (
        *profile.CASES,
        *refusals.CASES,
        *unsupported.CASES,
        *retries.CASES,
        *attaching.CASES,
        *operations.CASES,
        *busy.CASES,
        *fencing.CASES,
        *pausing.CASES,
        *aborting.CASES,
        *health.CASES,
        *profiling.CASES,
        *listeners.CASES,
        *resources.CASES,
        *releasing.CASES,
        *weights.CASES,
        *damaged_weights.CASES,
        *update_admission.CASES,
        *sessions.CASES,
        *serving.CASES,
        *cache_events.CASES,
        *adapters.CASES,
        *restarting.CASES,
        *ranks.CASES,
        *credentials.CASES,
        *whole_run.CASES,
    )


def chosen(cases: Sequence[Case], patterns: Sequence[str]) -> tuple[Case, ...]:
    """Those whose id matches one of the patterns (`retry.*`); all without any.

    Raises ValueError for a pattern that no case matches.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.id, pattern) for case in cases):
            raise ValueError(f"no case is called {pattern}")
    return tuple(
        case
        for case in cases
        if not patterns or any(fnmatch.fnmatchcase(case.id, pattern) for pattern in patterns)
    )
