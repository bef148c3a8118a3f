"""One rank's part of a prompt's KV, out of the cache into a file and back."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from typing import BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from app.reference_engine.errors import OrderRefused
from app.reference_engine.handoff_messages import PartFile
from app.reference_engine.model import KvCache


def write_part(
    cache: KvCache, blocks: Sequence[int], tokens: int, file: PartFile
) -> tuple[int, str]:
    """Size in bytes and sha256 in hex of what was written. Raises OSError."""
    index = torch.tensor(blocks, device=cache.keys.device)
    digest, size = hashlib.sha256(), 0
    with _opened(file, "r+b") as part:
        for side in (cache.keys, cache.values):
            rows = side[:, :, index].flatten(2, 3)[:, :, :tokens].contiguous().cpu()
            content = rows.numpy().data.cast("B")
            part.write(content)
            digest.update(content)
            size += content.nbytes
    return size, digest.hexdigest()


def read_part(cache: KvCache, blocks: Sequence[int], tokens: int, file: PartFile) -> None:
    """Raises OrderRefused for a part that is not of this cache's shape, or OSError."""
    layers, heads, _, block_size, dim = cache.keys.shape
    shape = (2, layers, heads, tokens, dim)
    size = int(np.prod(shape)) * np.dtype(np.float32).itemsize
    with _opened(file, "rb") as part:
        if os.fstat(part.fileno()).st_size != size or tokens > len(blocks) * block_size:
            raise OrderRefused("the KV handed over is not of this engine's shape")
        both = torch.from_numpy(np.fromfile(part, dtype=np.float32).reshape(shape))
    slots = torch.tensor(
        [blocks[at // block_size] * block_size + at % block_size for at in range(tokens)],
        device=cache.keys.device,
    )
    for side, rows in zip((cache.keys, cache.values), both, strict=True):
        _cells(side).index_copy_(2, slots, rows.to(side.device))


def _opened(file: PartFile, mode: Literal["rb", "r+b"]) -> BinaryIO:
    """Raises OSError, also when the path means another file by now."""
    part = open(file.path, mode)  # noqa: SIM115 (closed by the caller)
    if os.fstat(part.fileno()).st_ino != file.inode:
        part.close()
        raise OSError(errno.ESTALE, "it is another file by now")
    return part


def _cells(side: Tensor) -> Tensor:
    """The same memory as [layer, head, position in the cache, dimension]."""
    return side.view(*side.shape[:2], -1, side.shape[-1])
