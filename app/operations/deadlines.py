"""How long an order may take: the default of its kind, and the longest that may be asked for."""

from __future__ import annotations

from collections.abc import Mapping

from app.domain.errors import FieldFault, InvalidArgument
from app.domain.kinds import OperationKind

_SECOND_MS = 1_000
_MINUTE_MS = 60 * _SECOND_MS
_HOUR_MS = 60 * _MINUTE_MS

# Kind: (default, longest). A drain waits for the longest generation in flight.
TABLE_MS: Mapping[OperationKind, tuple[int, int]] = {
    OperationKind.FLUSH_CACHES: (_MINUTE_MS, 10 * _MINUTE_MS),
    OperationKind.PAUSE: (10 * _MINUTE_MS, 24 * _HOUR_MS),
    OperationKind.RESUME: (_MINUTE_MS, 10 * _MINUTE_MS),
    OperationKind.ABORT_REQUESTS: (_MINUTE_MS, 10 * _MINUTE_MS),
    OperationKind.RELEASE_RESOURCES: (10 * _MINUTE_MS, 24 * _HOUR_MS),
    OperationKind.RESTORE_RESOURCES: (10 * _MINUTE_MS, 2 * _HOUR_MS),
    OperationKind.UPDATE_WEIGHTS: (30 * _MINUTE_MS, 24 * _HOUR_MS),
    OperationKind.SET_WEIGHT_VERSION: (_MINUTE_MS, 10 * _MINUTE_MS),
    OperationKind.PROFILE: (30 * _MINUTE_MS, 2 * _HOUR_MS),
    OperationKind.RECONFIGURE_SERVING: (30 * _MINUTE_MS, 24 * _HOUR_MS),
    OperationKind.LOAD_LORA: (5 * _MINUTE_MS, _HOUR_MS),
    OperationKind.UNLOAD_LORA: (5 * _MINUTE_MS, _HOUR_MS),
    OperationKind.SHUTDOWN: (5 * _MINUTE_MS, _HOUR_MS),
}


class Deadlines:
    def __init__(self, defaults_ms: Mapping[OperationKind, int] | None = None) -> None:
        """`defaults_ms` replaces defaults of the table; ValueError above the longest or below 1."""
        self._defaults = {kind: default for kind, (default, _) in TABLE_MS.items()}
        for kind, given in (defaults_ms or {}).items():
            longest = TABLE_MS[kind][1]
            if not 1 <= given <= longest:
                raise ValueError(f"deadline of {kind.value}: 1 to {longest} ms, not {given}")
            self._defaults[kind] = given

    def of(self, kind: OperationKind, wanted_ms: int | None, engine_max_ms: int = 0) -> int:
        """Milliseconds. `engine_max_ms` 0: the engine names no maximum; else it bounds the default
        and what may be asked for. Raises InvalidArgument for what is too long or below 1."""
        longest = TABLE_MS[kind][1]
        if engine_max_ms:
            longest = min(longest, engine_max_ms)
        if wanted_ms is None:
            return min(self._defaults[kind], longest)
        if not 1 <= wanted_ms <= longest:
            said = f"a deadline of 1 to {longest} ms is possible here"
            raise InvalidArgument(said, faults=(FieldFault("/deadline_ms", said),))
        return wanted_ms
