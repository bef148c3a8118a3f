"""What a rank records of itself: torch's profiler, and the memory it holds.

A recording begins and ends in the rank's main thread, between or right after steps; what takes
long beside that is done in threads. Two things hold the steps up nevertheless, both for as long as
there are records to go through, which the limit on their memory bounds: torch collects them in the
main thread, and writes them without letting go of the interpreter.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from app.reference_engine.change_orders import Resource
from app.reference_engine.holding import Holding
from app.reference_engine.host_memory import memory_in_use, resident_bytes
from app.reference_engine.recording_orders import PrepareRecording, RecordingKind

# Records of torch's profiler take some 250 bytes for each event while they are made, and eight
# times that when they are written.
MOST_RECORD_BYTES = 128 << 20
_SAMPLE_S = 0.02
_STEP_GAP_NS = 2_000_000
_MOST_SAMPLES = 1 << 16


class Recorder(Protocol):
    """``prepare`` and ``save`` run in a thread, all else in the main one."""

    def prepare(self) -> None: ...

    def begin(self) -> None: ...

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step of the model."""

    @property
    def full(self) -> bool:
        """Whether it takes no more."""

    def end(self) -> None: ...

    def save(self, path: Path) -> None:
        """OSError, RuntimeError; or a file that is not whole: whoever reads it checks it."""


def recorder_of(
    order: PrepareRecording, holding: Holding, most_bytes: int = MOST_RECORD_BYTES
) -> Recorder:
    """Raises ValueError for what there is no device for."""
    device = holding.device.type == "cuda"
    match order.kind:
        case RecordingKind.MEMORY:
            return MemoryRecorder(lambda: memory_of(holding))
        case RecordingKind.DEVICE if not device:
            raise ValueError("there is no device to record")
        case RecordingKind.DEVICE:
            activities = [ProfilerActivity.CUDA]
        case RecordingKind.TORCH:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device else [])]
    return TorchRecorder(
        activities, shapes=order.record_shapes, stacks=order.with_stack, most_bytes=most_bytes
    )


class TorchRecorder:
    """Operators and, on a device, kernels, as torch's own profiler sees them."""

    def __init__(
        self, activities: list[ProfilerActivity], *, shapes: bool, stacks: bool, most_bytes: int
    ) -> None:
        self._torch: Any = profile(activities=activities, record_shapes=shapes, with_stack=stacks)
        self._most_bytes = most_bytes
        self._began_with = 0

    def prepare(self) -> None:
        """The first time in a process it takes seconds."""
        self._torch.prepare_trace()

    def begin(self) -> None:
        self._began_with = resident_bytes()
        self._torch.start_trace()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        with record_function(f"engine step {number}"):
            yield

    @property
    def full(self) -> bool:
        # Whatever else the process takes meanwhile counts too: its records can't be told apart.
        return resident_bytes() - self._began_with > self._most_bytes

    def end(self) -> None:
        self._torch.stop_trace()

    def save(self, path: Path) -> None:
        # Not by `export_chrome_trace`, which tries to read its own file again.
        self._torch.profiler.kineto_results.save(str(path))


class MemoryRecorder:
    """A timeline of counters, one for each thing that takes memory: after steps and every 20 ms.
    The longer it lasts, the coarser it becomes."""

    def __init__(
        self,
        measure: Callable[[], Mapping[str, int]],
        now_ns: Callable[[], int] = time.time_ns,
        most_samples: int = _MOST_SAMPLES,
    ) -> None:
        """``measure``: bytes by name."""
        self._measure = measure
        self._now_ns = now_ns
        self._most_samples = most_samples
        self._gap_ns = _STEP_GAP_NS
        self._samples: list[tuple[int, Mapping[str, int]]] = []
        self._taking = threading.Lock()
        self._over = threading.Event()
        self._sampling = threading.Thread(target=self._sample, name="memory", daemon=True)

    def prepare(self) -> None:
        self._measure()

    def begin(self) -> None:
        self._take(0)
        self._sampling.start()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:  # noqa: ARG002 (the port's)
        yield
        self._take(self._gap_ns)

    @property
    def full(self) -> bool:
        return False

    def end(self) -> None:
        self._over.set()
        self._sampling.join()
        self._take(0)

    def save(self, path: Path) -> None:
        first = self._samples[0][0]
        pid = os.getpid()
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", ')
            file.write(f'"baseTimeNanoseconds": {first}, "traceEvents": [\n')
            name = {"ph": "M", "name": "process_name", "ts": 0, "pid": pid, "tid": 0}
            file.write(json.dumps({**name, "args": {"name": "memory of the rank"}}))
            for event in _counters(self._samples, first, pid):
                file.write(",\n" + json.dumps(event))
            file.write("\n]}\n")

    def _sample(self) -> None:
        while not self._over.wait(max(_SAMPLE_S, self._gap_ns / 1e9)):
            self._take(self._gap_ns)

    def _take(self, gap_ns: int) -> None:
        """Unless the last sample is younger than that."""
        with self._taking:
            now = self._now_ns()
            if self._samples and now - self._samples[-1][0] < gap_ns:
                return
            self._samples.append((now, dict(self._measure())))
            if len(self._samples) >= self._most_samples:
                self._samples = self._samples[::2]
                self._gap_ns *= 2


def _counters(
    samples: list[tuple[int, Mapping[str, int]]], first: int, pid: int
) -> Iterator[dict[str, Any]]:
    """An event where a number has changed, and one for each at the end."""
    known: dict[str, int] = {}
    last = samples[-1][0]
    for at, sizes in samples:
        for name, size in sizes.items():
            if known.get(name) == size and at != last:
                continue
            known[name] = size
            yield {
                "ph": "C",
                "name": name,
                "ts": (at - first) / 1000,
                "pid": pid,
                "tid": 0,
                "args": {"bytes": size},
            }


def memory_of(holding: Holding) -> dict[str, int]:
    """Bytes. The process's resident set holds the weights and the cache too where they are on the
    CPU; host copies are what a release has preserved, outside of it."""
    sizes = {
        "resident set": resident_bytes(),
        "weights": holding.bytes_held(Resource.WEIGHTS),
        "KV cache": holding.bytes_held(Resource.KV_CACHE),
        "host copies": holding.bytes_kept,
    }
    if holding.device.type == "cuda":
        sizes["device allocated"] = int(torch.cuda.memory_allocated(holding.device))
        sizes["device reserved"] = memory_in_use(holding.device)
    return sizes
