"""A trainer in a thread: it opens a process group as RL frameworks do, and broadcasts in it."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from app.rpc.openengine.v1 import admin_pb2 as pb

c10d: Any = dist
PATIENCE = dt.timedelta(seconds=60)
GROUP = "policy-update"


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "model.safetensors")


class Trainer:
    """Member 0 of a group with ``ranks`` more. ``act`` is called once all are there. Until it is
    started there is a place to meet, and nobody who comes."""

    def __init__(self, ranks: int, act: Callable[[Trainer], None], port: int = 0) -> None:
        self.ranks = ranks
        self.said: list[str] = []
        self.joined = threading.Event()
        self.over = threading.Event()
        self._act = act
        self._store: Any = c10d.TCPStore(
            "127.0.0.1", port, is_master=True, timeout=PATIENCE, wait_for_workers=False
        )
        self.port: int = self._store.port
        self._group: Any = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        parts = c10d.distributed_c10d
        store = c10d.PrefixStore(GROUP, self._store)
        size = self.ranks + 1
        try:
            self._group, _ = parts._new_process_group_helper(
                size, 0, [], c10d.Backend("gloo"), store, GROUP, timeout=PATIENCE
            )
            parts._world.pg_group_ranks[self._group] = {one: one for one in range(size)}
            self.joined.set()
            self._act(self)
        except RuntimeError as error:
            self.said.append(str(error))
        finally:
            self.leave()

    def send(self, *tensors: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors:
            self._group.broadcast([tensor.contiguous()], options).wait()

    def stay(self) -> None:
        """Until the test is over."""
        self.over.wait(PATIENCE.total_seconds())

    def leave(self) -> None:
        """Every connection ends, as with a process that dies."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = None

    def source(
        self, tensors: dict[str, Tensor], dtype: pb.TensorDtype.ValueType, **fields: Any
    ) -> pb.DistributedWeights:
        """What an order says of it."""
        given: dict[str, Any] = {
            "backend": pb.COLLECTIVE_BACKEND_GLOO,
            "address": "127.0.0.1",
            "port": self.port,
            "world_size": self.ranks + 1,
            "rank_offset": 1,
            "group": GROUP,
            "tensors": [
                pb.TensorSpec(name=name, dtype=dtype, shape=list(tensor.shape))
                for name, tensor in tensors.items()
            ],
            **fields,
        }
        return pb.DistributedWeights(**given)


@contextmanager
def trainer(ranks: int, act: Callable[[Trainer], None], port: int = 0) -> Iterator[Trainer]:
    made = Trainer(ranks, act, port)
    made.thread.start()
    try:
        yield made
    finally:
        made.over.set()
        made.thread.join(PATIENCE.total_seconds())
        assert not made.thread.is_alive()


def half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a trainer has them that computes in bfloat16."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
