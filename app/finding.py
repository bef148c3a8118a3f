"""From settings to the sources of engines that they name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from app.clock import Clock
from app.discovery.endpoints import Shape
from app.discovery.file import FileSource
from app.discovery.follower import Follower
from app.discovery.house import Finding
from app.discovery.kubernetes import Cluster, KubernetesSource
from app.discovery.source import Source
from app.discovery_settings import DiscoverySettings, KubernetesSettings
from app.domain.engine import TlsNames
from app.ledger.ledger import Ledger
from app.observability.log import logger
from app.observability.metrics import Metrics
from app.operations.fleet import Fleet
from app.settings import Settings
from app.startup import EXIT_SETTINGS, StartupRefused

_log = logger("chadburn.discovery")


@dataclass(frozen=True, slots=True)
class Sought:
    """A source, and how long an engine has to be missing from it before it is removed."""

    source: Source
    patience_s: float


def sources_of(settings: Settings) -> tuple[Sought, ...]:
    """None of them where the gateway changes nothing (`read_only`): who else is on the ledger
    follows them. Raises StartupRefused."""
    sought = tuple(Sought(_source(given), given.patience_s) for given in settings.discovery)
    if settings.read_only and sought:
        _log.warning("discovery_stands_still", why="read_only")
        return ()
    return sought


def finding_of(
    sources: Iterable[Sought],
    ledger: Ledger,
    fleet: Fleet,
    clock: Clock,
    owner: str,
    metrics: Metrics,
) -> Finding:
    return Finding(
        Follower(
            one.source,
            ledger,
            fleet,
            clock,
            owner=owner,
            remove_after_s=one.patience_s,
            on_state=metrics.discovered,
        )
        for one in sources
    )


def _source(given: DiscoverySettings) -> Source:
    if given.file is not None:
        return FileSource(given.known_as, given.file)
    assert given.kubernetes is not None
    return _cluster(given.known_as, given.kubernetes)


def _cluster(name: str, given: KubernetesSettings) -> KubernetesSource:
    """Raises StartupRefused where neither settings nor surroundings say where the API server is."""
    api_url = given.api_url
    if api_url is None:
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        port = os.environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            line = f"discovery {name}: set api_url: this process is in no pod"
            raise StartupRefused(line, EXIT_SETTINGS)
        api_url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return KubernetesSource(
        name,
        Cluster(
            api_url=api_url,
            namespace=given.namespace or given.namespace_file,
            selector=given.selector,
            token_file=given.token_file,
            ca_file=given.ca_file,
        ),
        Shape(
            admin_port=given.admin_port,
            control_port=given.control_port or given.admin_port,
            dialect=given.dialect,
            tls=TlsNames(given.server_name, given.credential),
            labels=given.labels,
        ),
    )
