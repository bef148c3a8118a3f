"""What an operator lets orders name. Paths are judged by where they lead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from app.enginekit.rendezvous import RendezvousRule
from app.enginekit.runtime import RuntimeFault


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Paths are those of the engine, which this process has to see too: it looks at what it orders.
    Without roots nothing is read, and without rules of `rendezvous` no trainer is met.
    `pickled`: pass on what the engine unpickles, which may run whatever its writer put there.
    `unconfigured_release`: offer release also of an engine that was not started to give memory
    back, which is good for trying things out.
    """

    weights_roots: tuple[Path, ...] = ()
    rendezvous: tuple[RendezvousRule, ...] = ()
    lora_roots: tuple[Path, ...] = ()
    unconfigured_release: bool = False
    pickled: bool = False


def below(roots: Iterable[Path], named: str) -> Path:
    """Links are followed first. Blocks on the disk. Raises RuntimeFault, with one answer for what
    is not allowed and what is not there."""
    try:
        real = Path(named).resolve(strict=True)
        allowed = Path(named).is_absolute() and any(
            real.is_relative_to(root.resolve()) for root in roots
        )
    except (OSError, ValueError, RuntimeError):  # links that lead in a circle are the last
        allowed = False
    if not allowed:
        raise RuntimeFault(
            "PATH_NOT_ALLOWED",
            "nothing below the allowed roots is at this path",
            code="INVALID_ARGUMENT",
        )
    return real


def folder_below(roots: Iterable[Path], named: str) -> Path:
    """The same of what an engine looks for files in, which it does by a pattern: with one in the
    name it would read other folders than were looked at. Blocks on the disk. Raises
    RuntimeFault."""
    real = below(roots, named)
    if any(sign in str(real) for sign in "*?["):
        raise RuntimeFault(
            "PATH_NOT_ALLOWED",
            "engines take *, ? and [ in a path for a pattern: name the folder otherwise",
            code="INVALID_ARGUMENT",
        )
    return real


def all_below(roots: Iterable[Path], named: str) -> Path:
    """The same of a folder, and of each file in it, which may be a link of its own."""
    roots = tuple(roots)
    real = folder_below(roots, named)
    for path in real.rglob("*") if real.is_dir() else ():
        below(roots, str(path))
    return real
