"""From Kubernetes' EndpointSlices to engines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.discovery.source import Listed
from app.domain.engine import Dialect, Member, TlsNames
from app.domain.selectors import is_engine_id
from app.operations.registering import EngineDraft

SERVICE = "kubernetes.io/service-name"
_FAMILIES = ("IPv4", "IPv6", "FQDN")
"""The first of them that an endpoint has is where it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What every engine of a source has in common."""

    admin_port: str = "admin"
    control_port: str = "admin"
    dialect: Dialect = Dialect.OPENENGINE
    tls: TlsNames = field(default_factory=TlsNames)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Found:
    rank: tuple[int, str]
    draft: EngineDraft


def engines_of(
    slices: Iterable[Mapping[str, Any]], shape: Shape
) -> tuple[Listed, Mapping[str, str]]:
    """The engines, and what is listed and can't be one, each with why.

    An endpoint is an engine as long as it is listed, ready or not: one that is paused is not ready,
    and is not gone. Its id is the name of its pod.
    """
    found: dict[str, _Found] = {}
    remarks: dict[str, str] = {}
    for one in slices:
        meta = one.get("metadata") or {}
        name = str(meta.get("name"))
        ports = {port.get("name") or "": port.get("port") for port in one.get("ports") or ()}
        missing = [port for port in (shape.admin_port, shape.control_port) if not ports.get(port)]
        if missing:
            remarks[name] = f"has no port {missing[0]!r}"
            continue
        family = one.get("addressType")
        if family not in _FAMILIES:
            remarks[name] = "has addresses of a kind that is not known"
            continue
        labels = {
            **shape.labels,
            "kubernetes/namespace": str(meta.get("namespace")),
            "kubernetes/service": str((meta.get("labels") or {}).get(SERVICE, "")),
        }
        rank = (_FAMILIES.index(family), name)
        for engine_id, host in _endpoints(one, remarks):
            if engine_id in found and found[engine_id].rank <= rank:
                continue
            host = f"[{host}]" if family == "IPv6" else host
            member = Member(
                0, f"{host}:{ports[shape.admin_port]}", f"{host}:{ports[shape.control_port]}"
            )
            draft = EngineDraft(
                id=engine_id, dialect=shape.dialect, members=(member,), tls=shape.tls, labels=labels
            )
            found[engine_id] = _Found(rank, draft)
    return {engine_id: one.draft for engine_id, one in found.items()}, remarks


def _endpoints(one: Mapping[str, Any], remarks: dict[str, str]) -> Iterator[tuple[str, str]]:
    for endpoint in one.get("endpoints") or ():
        target = endpoint.get("targetRef") or {}
        addresses = endpoint.get("addresses") or ()
        name = target.get("name") if target.get("kind") == "Pod" else endpoint.get("hostname")
        if not addresses:
            continue
        if not name:
            remarks[str(addresses[0])] = "has no pod, and no name"
        elif not is_engine_id(name):
            remarks[name] = "an id has 1 to 63 of a-z, 0-9 and -, and no - at either end"
        else:
            yield name, str(addresses[0])
