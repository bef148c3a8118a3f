"""Where a trainer may be met, with refusals that are the engine's."""

from __future__ import annotations

from app.enginekit.rendezvous import RendezvousRefused, RendezvousRule
from app.enginekit.rendezvous import resolved as looked_up
from app.reference_engine.errors import SourceRefused

__all__ = ["RendezvousRule", "resolved"]


def resolved(rules: tuple[RendezvousRule, ...], host: str, port: int) -> str:
    """The address to connect to. Blocks on the resolver. Raises SourceRefused."""
    try:
        return looked_up(rules, host, port)
    except RendezvousRefused as refused:
        raise SourceRefused(str(refused)) from refused
