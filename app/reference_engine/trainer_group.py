"""One member of a trainer's process group, which receives what another member broadcasts.

The group has nothing to do with the one in which the ranks compute: a store, a process group and
connections of its own. Only bytes of tensors come through it; nothing is unpickled.
"""

from __future__ import annotations

import datetime as dt
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.reference_engine.transfer_messages import GroupBackend, JoinGroup, MemberStep

log = logging.getLogger(__name__)

# What each build has of it differs: nccl is there with CUDA alone.
c10d: Any = dist

_CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 0.1
# What `torch.distributed.init_process_group` calls the group that it makes, and its place in it.
_DEFAULT_GROUP = "default_pg"
_DEFAULT_NAME = "0"


class GroupBroken(Exception):
    """The group did not come about, or can not go on."""


class TrainerGroup:
    """All calls block; the process is killed when that takes too long."""

    def __init__(self, order: JoinGroup, rank: int, reached: Callable[[MemberStep], None]) -> None:
        """Returns when every member of the group is there. Raises GroupBroken."""
        self._source = order.source_rank
        self._device = _device(order.backend, rank)
        reached(MemberStep.LOOKING)
        own_address = _reach(order)
        reached(MemberStep.CONNECTED)
        try:
            self._group = _join(order, rank, own_address)
        except RuntimeError as error:
            log.warning("rank %d can not join the trainer's group: %s", rank, error)
            raise GroupBroken("the group did not come about") from error
        reached(MemberStep.JOINED)

    def receive(self, target: Tensor) -> None:
        """Fill bytes on the CPU with the next broadcast. Raises GroupBroken."""
        there = target if self._device.type == "cpu" else target.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank = self._source
        options.rootTensor = 0
        try:
            self._group.broadcast([there], options).wait()
            if there is not target:
                target.copy_(there)  # waits for the device
        except RuntimeError as error:
            log.warning("a broadcast was not received: %s", error)
            raise GroupBroken("the connection to another member of the group ended") from error


def _device(backend: GroupBackend, rank: int) -> torch.device:
    if backend is GroupBackend.GLOO:
        return torch.device("cpu")
    if not dist.is_nccl_available() or torch.cuda.device_count() <= rank:
        raise GroupBroken("nccl needs a CUDA device for each rank")
    return torch.device("cuda", rank)


def _reach(order: JoinGroup) -> str:
    """Wait until somebody listens at the rendezvous. Gives the address of this machine that leads
    there: the other members are told it."""
    until = time.monotonic() + order.patience_s
    while True:
        try:
            with socket.create_connection((order.address, order.port), _CONNECT_TIMEOUT_S) as made:
                return str(made.getsockname()[0])
        except OSError as error:
            if time.monotonic() > until:
                raise GroupBroken(f"nobody is at the rendezvous ({error.strerror})") from error
        time.sleep(_RETRY_S)


def _join(order: JoinGroup, rank: int, own_address: str) -> Any:
    patience = dt.timedelta(seconds=order.patience_s)
    member = order.rank_offset + rank
    store: Any = c10d.TCPStore(
        order.address, order.port, order.world_size, is_master=False, timeout=patience
    )
    # The keys under which torch's own functions find each other, so that a trainer can use them.
    outer, name = order.group, order.group
    if order.group == _DEFAULT_GROUP:
        name = _DEFAULT_NAME
    for prefix in (outer, f"{name}/", f"{_device_type(order.backend)}/"):
        store = c10d.PrefixStore(prefix, store)
    if order.backend is GroupBackend.NCCL:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = patience
        return c10d.ProcessGroupNCCL(store, member, order.world_size, options)
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = patience
    options._threads = 1
    # Left to itself, gloo takes whatever address the host's name has.
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own_address)]
    return c10d.ProcessGroupGloo(store, member, order.world_size, options)


def _device_type(backend: GroupBackend) -> str:
    return "cuda" if backend is GroupBackend.NCCL else "cpu"
