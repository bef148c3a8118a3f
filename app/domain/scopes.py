"""Admin scopes: one per kind of permission, none of them shared with inference."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Scope(StrEnum):
    READ = "admin:read"
    ENGINES = "admin:engines"
    CACHE = "admin:cache"
    PAUSE = "admin:pause"
    RESOURCES = "admin:resources"
    WEIGHTS = "admin:weights"
    WEIGHTS_UNSAFE = "admin:weights.unsafe"
    PROFILE = "admin:profile"
    RECONFIGURE = "admin:reconfigure"
    ADAPTERS = "admin:adapters"
    ABORT = "admin:abort"
    SHUTDOWN = "admin:shutdown"
    CANCEL = "admin:cancel"
    SETTLE = "admin:settle"
    AUDIT = "admin:audit"


_BY_NAME = {scope.value: scope for scope in Scope}


def admin_scopes(names: Iterable[str]) -> frozenset[Scope]:
    """The admin scopes literally named. Unknown names, wildcards and prefixes grant nothing."""
    return frozenset(_BY_NAME[name] for name in names if name in _BY_NAME)
