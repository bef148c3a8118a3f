"""Paths that orders name, judged by where they lead."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from app.enginekit.runtime import RuntimeFault


def below(roots: Iterable[Path], named: str) -> Path:
    """Links are followed first. Blocks on the disk. Raises RuntimeFault, with one answer for what
    is not allowed and what is not there."""
    try:
        real = Path(named).resolve(strict=True)
        allowed = Path(named).is_absolute() and any(
            real.is_relative_to(root.resolve()) for root in roots
        )
    except (OSError, ValueError):
        allowed = False
    if not allowed:
        raise RuntimeFault(
            "PATH_NOT_ALLOWED",
            "nothing below the allowed roots is at this path",
            code="INVALID_ARGUMENT",
        )
    return real


def all_below(roots: Iterable[Path], named: str) -> Path:
    """The same of a folder, and of each file in it, which may be a link of its own."""
    roots = tuple(roots)
    real = below(roots, named)
    for path in real.rglob("*") if real.is_dir() else ():
        below(roots, str(path))
    return real
