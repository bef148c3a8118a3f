"""Memory of a rank: measured, given back, and tensors kept outside of it."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.reference_engine.errors import OrderRefused
from app.reference_engine.tensor_files import TensorFile

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_in_use(device: torch.device) -> int:
    """Bytes: the process's resident set, or what the CUDA allocator has reserved."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    return resident_bytes()


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def give_memory_back(device: torch.device) -> None:
    """Return what was freed to the system; the allocators would keep much of it for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def sha256_of(tensors: Mapping[str, Tensor], proceed: Callable[[], None] = lambda: None) -> str:
    """One checksum over names, types, shapes and bytes, whatever the order of the mapping."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        proceed()
        _add(digest, name, tensors[name])
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    there = tensor.cpu().contiguous()
    digest.update(f"{name} {there.dtype} {tuple(there.shape)}\n".encode())
    raw: Any = there.view(-1).view(torch.uint8).numpy()
    digest.update(memoryview(raw))


class RunningChecksum:
    """The checksum of :func:`sha256_of` over tensors that come one by one, computed in a thread
    while the next ones are read: each takes about as long as the other. ``names``: of all that
    will come. A context manager; what it has not begun when that ends is left."""

    def __init__(self, names: Iterable[str]) -> None:
        self._missing = deque(sorted(names))
        self._came: dict[str, Tensor] = {}
        self._digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, "checksum")
        self._added: list[Future[None]] = []

    def __enter__(self) -> RunningChecksum:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take(self, name: str, tensor: Tensor) -> None:
        """It must not be written to before the checksum is there."""
        self._came[name] = tensor
        while self._missing and self._missing[0] in self._came:
            following = self._missing.popleft()
            tensor = self._came.pop(following)
            self._added.append(self._pool.submit(_add, self._digest, following, tensor))

    def hexdigest(self, proceed: Callable[[], None]) -> str:
        """When all have come. ``proceed`` may raise to stop the waiting."""
        assert not self._missing, self._missing
        for added in self._added:
            proceed()
            added.result()
        return self._digest.hexdigest()


class HostCopy:
    """Tensors in an anonymous memory file: host memory, never a disk, gone with the process, and
    not mapped, so that the copies do not count as memory that the rank still uses."""

    def __init__(self, tensors: Mapping[str, Tensor], proceed: Callable[[], None]) -> None:
        """Raises OrderRefused when the memory is not there."""
        self._fd = os.memfd_create("chadburn-kept", os.MFD_CLOEXEC)
        self._entries: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}
        self.bytes = 0
        try:
            for name, tensor in tensors.items():
                proceed()
                raw: Any = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
                self._write(memoryview(raw))
                self._entries[name] = (tensor.dtype, tuple(tensor.shape), self.bytes)
                self.bytes += tensor.nbytes
        except OSError as error:
            self.close()
            raise OrderRefused(f"no host memory for a copy ({error.strerror})") from error
        except BaseException:
            self.close()
            raise

    def read(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors again, in memory of their own."""
        tensors = {}
        with TensorFile(Path(f"/proc/self/fd/{self._fd}")) as file:
            for name, (dtype, shape, begin) in self._entries.items():
                tensors[name] = torch.empty(shape, dtype=dtype)
                file.read_into(begin, tensors[name])
                tensors[name] = tensors[name].to(device)
        return tensors

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, content: memoryview) -> None:
        while content:
            content = content[os.write(self._fd, content[: 1 << 30]) :]
