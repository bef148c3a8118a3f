"""Whether traces are sent, and where: decided here, without importing what sends them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from app.observability.otlp import OtlpTracing

AS_THE_VARIABLES_SAY = "otel"
_MISSING = "traces need OpenTelemetry's SDK: install chadburn[otel]"
_NO_ENDPOINT = f"traces: takes an http or https URL without a user, or {AS_THE_VARIABLES_SAY!r}"


class TracesRefused(Exception):
    """One line for whoever starts the process. Quotes no endpoint, which may hold a secret."""


def sends_traces(where: str | None) -> bool:
    """The SDK's own variables can switch off what is switched on here, and nothing else."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    nowhere = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    return where is not None and not off and not nowhere


def opened_traces(where: str, service: str) -> OtlpTracing:
    """`where`: the endpoint of a collector, or `otel`. Raises TracesRefused."""
    endpoint = None if where == AS_THE_VARIABLES_SAY else where
    if endpoint is not None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise TracesRefused(_NO_ENDPOINT)
    try:
        from app.observability.otlp import OtlpTracing, ProtocolUnknown
    except ImportError as missing:
        raise TracesRefused(_MISSING) from missing
    try:
        return OtlpTracing(service, endpoint)
    except ProtocolUnknown as unknown:
        raise TracesRefused(str(unknown)) from unknown
    except ImportError as missing:
        raise TracesRefused(_MISSING) from missing
