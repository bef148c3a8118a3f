"""What the operator of the engine allows; nothing of it can be changed by a caller."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

ROOTS = "CHADBURN_VLLM_ROOTS"
REFERENCE = "CHADBURN_VLLM_REFERENCE"


@dataclass(frozen=True)
class Options:
    """`roots`: folders below which checkpoints may lie. `reference`: a checkpoint of the served
    model whose names, shapes and dtypes are the measure; None: the one the engine started from."""

    roots: tuple[str, ...]
    reference: str | None


def read_options(additional_config: object, environment: Mapping[str, str]) -> Options:
    """From vLLM's `--additional-config '{"disk_weights": {"roots": [...], "reference": "..."}}'`,
    each where it says nothing from the environment: CHADBURN_VLLM_ROOTS (folders parted by `:`) and
    CHADBURN_VLLM_REFERENCE.

    Raises: ValueError. No root at all is an error too: an engine that may read nothing can't be
    updated, and one that may read everything was never asked for.
    """
    mine = additional_config.get("disk_weights", {}) if isinstance(additional_config, dict) else {}
    if not isinstance(mine, dict) or set(mine) - {"roots", "reference"}:
        raise ValueError('additional_config["disk_weights"] takes "roots" and "reference" alone')
    given = environment.get(ROOTS, "")
    roots = mine.get("roots", [each for each in given.split(os.pathsep) if each])
    reference = mine.get("reference", environment.get(REFERENCE) or None)
    if not isinstance(roots, list) or not all(_is_folder(root) for root in roots):
        raise ValueError(f"the roots of weights ({ROOTS}) must be absolute paths of folders")
    if not roots:
        raise ValueError(f"no root of weights is allowed: set {ROOTS} for the engine")
    if reference is not None and not isinstance(reference, str):
        raise ValueError(f"the reference ({REFERENCE}) must be a path")
    return Options(tuple(os.path.realpath(root) for root in roots), reference)


def _is_folder(path: object) -> bool:
    return isinstance(path, str) and os.path.isabs(path) and os.path.isdir(path)
