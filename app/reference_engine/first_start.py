"""Where an engine without a checkpoint finds one, and who makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from app.reference_engine.errors import StartupFailed
from app.reference_engine.processes import own_environment, own_module

# Part of the folder's name: a checkpoint of an earlier recipe is never mistaken for a later one.
_RECIPE = 1


def tiny_checkpoint_path(parent: Path, seed: int) -> Path:
    """The folder of the small checkpoint for ``seed``; there once it is whole."""
    return parent / f"tiny-llama-{_RECIPE}-{seed}"


async def find_or_make_tiny_checkpoints(
    wanted: Sequence[tuple[Path, int]], deadline_s: float
) -> list[Path]:
    """The folders of small checkpoints, each below a parent and of a seed, made by a process that
    ends with it: it takes torch, which the front end does not load. Raises StartupFailed with that
    process's last line."""
    paths = [tiny_checkpoint_path(parent, seed) for parent, seed in wanted]
    if all(path.is_dir() for path in paths):
        return paths
    making = await asyncio.create_subprocess_exec(
        *own_module("app.reference_engine.tiny_model"),
        *(str(part) for one in wanted for part in one),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=own_environment(),
    )
    try:
        async with asyncio.timeout(deadline_s):
            _, said = await making.communicate()
    except BaseException as error:
        if making.returncode is None:
            making.kill()
            await making.communicate()
        if isinstance(error, TimeoutError):
            cause = f"no small checkpoint within {deadline_s:g} s"
            raise StartupFailed(cause) from None
        raise
    if making.returncode != 0:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        raise StartupFailed(f"no small checkpoint could be made: {''.join(last)}")
    return paths
