"""What the settings say of the gateway's edge: where it is, what it takes, for which engines."""

from __future__ import annotations

from urllib.parse import urlsplit

from app.auth.tokens.dpop import PROOF_ALGORITHMS
from app.domain.selectors import Selector
from app.http.compat.exposures import Exposure, Exposures, Flavour, Layer
from app.http.rooms import EdgeSettings
from app.settings import CompatSettings, EnginePayloadSettings, Settings


def edge_of(settings: Settings) -> EdgeSettings:
    uses = [issuer.dpop for issuer in settings.issuers]
    return EdgeSettings(
        base_url=settings.base_url,
        authorization_servers=tuple(issuer.issuer for issuer in settings.issuers),
        audiences={
            issuer.issuer: audience
            for issuer in settings.issuers
            if (audience := issuer.audience or settings.audience)
        },
        proof_algorithms=PROOF_ALGORITHMS if any(used != "off" for used in uses) else (),
        proofs_required=all(used == "required" for used in uses),
        stream_max_s=settings.stream_max_s,
        stream_send_timeout_s=settings.stream_send_timeout_s,
        request_timeout_s=settings.request_timeout_s,
    )


def exposures_of(settings: Settings) -> Exposures:
    """Which engines are reached by endpoints of their own."""
    return Exposures(
        tuple(
            Exposure(
                selector_of(one),
                *(Flavour(one.flavour), Layer(one.layer)),
            )
            for one in settings.compat
        )
    )


def selector_of(named: CompatSettings | EnginePayloadSettings) -> Selector:
    return Selector(
        ids=frozenset(named.engines) or None,
        labels={name: frozenset(values) for name, values in named.labels.items()},
    )


def hosts_of(settings: Settings) -> tuple[str, ...]:
    public = urlsplit(settings.base_url).hostname or ""
    others: set[str] = set()
    for one in settings.compat_identity:
        # Who comes by a socket names no host in particular, and mostly this one.
        others.add("localhost" if one.tls is None else one.tls.listen.rpartition(":")[0])
    return (public, settings.host, *settings.allowed_hosts, *sorted(others))
