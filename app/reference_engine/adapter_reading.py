"""An adapter's tensors from its file, on one rank: only this rank's part is read.

Source of the names: what Hugging Face peft writes for an adapter of a causal language model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from app.reference_engine.adapter_orders import AdapterSource, PrepareLoad
from app.reference_engine.demanded import LOADABLE, expected_shapes
from app.reference_engine.errors import AdapterRefused
from app.reference_engine.host_memory import sha256_of
from app.reference_engine.lora import Adapter, LowRank
from app.reference_engine.sharding import Cut, Layout
from app.reference_engine.source_reading import same_place
from app.reference_engine.tensor_files import Entry, TensorFile

_PREFIX = "base_model.model."
# One full AVX-512 register of floats: sums over the rank then have no scalar remainder, whose
# order could depend on how many rows are computed at once.
_RANK_TILE = 16


def read_adapter(
    order: PrepareLoad, layout: Layout, device: torch.device, proceed: Callable[[], None]
) -> tuple[Adapter, str]:
    """The adapter as this rank uses it, and what stands for the file that was read: equal on all
    ranks if and only if they read the same file in the same state.

    Raises CheckpointError or AdapterRefused, naming file or tensor.
    """
    source = order.adapter.source
    with TensorFile(Path(source.path), check=same_place(source.path)) as file:
        # Every rank reads the same file (that is checked before a commit), so one looks at its sum.
        if layout.rank == 0 and file.sha256(proceed) != source.sha256:
            raise AdapterRefused("the adapter's file changed while it was being loaded")
        changes = _changes(file, source, layout, device, proceed)
        file.check_unchanged()
        read = repr(file.identity)
    adapter = Adapter(loaded=order.adapter, key=order.change_id, sha256="", changes=changes)
    sha256 = sha256_of(adapter.tensors, proceed)
    return Adapter(loaded=order.adapter, key=order.change_id, sha256=sha256, changes=changes), read


def _changes(
    file: TensorFile,
    source: AdapterSource,
    layout: Layout,
    device: torch.device,
    proceed: Callable[[], None],
) -> dict[str, LowRank]:
    entries = file.entries()
    expected = {_name(module, which) for module in source.modules for which in "AB"}
    for name in entries:
        if name not in expected:
            raise AdapterRefused(
                f"tensor {name[:200]!r} is none that adapter_config.json speaks of"
            )
    shapes = expected_shapes(layout.config)
    found = {}
    for module in source.modules:
        proceed()
        outputs, inputs = shapes[f"{module}.weight"]
        cut = layout.cut(f"{module}.weight")
        down = _part(
            file, entries, _name(module, "A"), (source.rank, inputs), cut if _of(cut, 1) else None
        )
        up = _part(
            file, entries, _name(module, "B"), (outputs, source.rank), cut if _of(cut, 0) else None
        )
        fill = -source.rank % _RANK_TILE
        down = torch.nn.functional.pad(down, (0, 0, 0, fill))
        up = torch.nn.functional.pad(up * source.scale, (0, fill))
        found[module] = LowRank(down.contiguous().to(device), up.contiguous().to(device))
    return found


def _name(module: str, which: str) -> str:
    return f"{_PREFIX}{module}.lora_{which}.weight"


def _of(cut: Cut | None, dim: int) -> bool:
    return cut is not None and cut.dim == dim


def _part(
    file: TensorFile, entries: dict[str, Entry], name: str, shape: tuple[int, int], cut: Cut | None
) -> Tensor:
    entry = entries.get(name)
    if entry is None:
        raise AdapterRefused(f"tensor {name!r} is missing")
    if entry.shape != shape:
        raise AdapterRefused(f"tensor {name!r} should be of shape {shape}, found {entry.shape}")
    if entry.dtype not in LOADABLE:
        raise AdapterRefused(f"tensor {name!r} is not of a plain floating point type")
    part = file.tensor(entry, cut).to(torch.float32)
    # What a rank has whole, all look at; of what is divided, each at its own part.
    if not bool(torch.isfinite(part).all()):
        raise AdapterRefused(f"tensor {name!r} has a value that is not a finite number")
    return part
