"""A checkpoint that an order names, looked at before an engine is sent to it.

Engines read files into the model that serves, and some of them end with a file that does not fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.domain.tensors import TensorSpec
from app.domain.weight_sources import DiskWeights
from app.enginekit.tensor_names import SAFETENSORS
from app.sidecars.allowed import Allowed, below, folder_below
from app.sidecars.safetensors import BadWeights, WeightsFile, files_at, fits, forms_fit


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`path` as resolved: what the engine is sent."""

    path: Path
    files: tuple[WeightsFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def looked_at(
    source: DiskWeights, allowed: Allowed, *, model: Path | None, check_finite: bool
) -> Checkpoint:
    """`model`: what it has to fit; None: not known here. Blocks on the disk. Raises BadWeights,
    RuntimeFault."""
    path = folder_below(allowed.weights_roots, source.path)
    files = files_at(path)
    for file in files:
        below(allowed.weights_roots, str(file.path))  # each may be a link of its own
    if model is not None:
        fits(files, files_at(model))
    digests = {digest.name: digest.sha256 for digest in source.digests}
    for file in files if digests else ():
        if digests.pop(file.path.name, None) != file.sha256():
            raise BadWeights(f"{file.path.name} has another SHA-256 than was ordered")
    if digests:
        raise BadWeights(f"{len(digests)} of the files that were ordered are not there")
    if check_finite:
        for file in files:
            name = file.finite()
            if name is not None:
                raise BadWeights(f"{name} holds something that is no finite number")
    return Checkpoint(path, files)


def specs_fit(specs: Iterable[TensorSpec], model: Path, *, whole: bool) -> None:
    """Whether the model at that path has such tensors. `whole`: and no others. Blocks on the disk.
    Raises BadWeights."""
    forms = {spec.name: (SAFETENSORS[spec.dtype], spec.shape) for spec in specs}
    forms_fit(forms, files_at(model), whole=whole)


def folder_of(root: str) -> Path | None:
    """Where an engine's own model lies. None: not here, or it was named by its place in a hub, and
    nothing is known of it."""
    path = Path(root)
    return path if path.is_absolute() and path.is_dir() else None


def digest_of(sums: Mapping[str, str]) -> bytes:
    """Over names and digests in order: equal for equal weights, whatever way they came."""
    whole = hashlib.sha256()
    for name, digest in sorted(sums.items()):
        whole.update(f"{name}\0{digest}\n".encode())
    return whole.digest()
