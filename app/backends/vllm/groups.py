"""A trainer's process group that the engine joins by a call of its own, before any update names it.

vLLM stays in such a group over as many updates as come, and its trainer takes part in opening it
once. An update that opened it again would wait for a trainer who is not there, so it is kept which
group the engine is in: the update that names that one only begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from app.backends.port import EngineRefused, EngineSilent, Silence
from app.backends.vllm.kept import Kept
from app.backends.vllm.members import Crew
from app.backends.vllm.notes import Notes, Overtaken
from app.backends.vllm.observing import observe
from app.backends.vllm.payloads import init_infos
from app.backends.vllm.refusals import refused
from app.backends.vllm.statuses import Done, Lost
from app.backends.vllm.verdicts import first_error
from app.domain.weight_sessions import NcclTransfer
from app.rpc.vllm import control_pb2 as pb

_READ_S = 3.0
_LOOK_AGAIN_S = 0.1


def is_in(kept: Kept, transfer: object) -> bool:
    """Whether the engine has joined that group, and stays in it."""
    return isinstance(transfer, NcclTransfer) and kept.group == transfer.document()


async def join(
    transfer: NcclTransfer,
    crew: Crew,
    notes: Notes,
    now: Callable[[], datetime],
    timeout_s: float,
) -> None:
    """Returns when all members are in. Raises EngineRefused; EngineSilent: it is not known, and
    counts as not joined."""
    reading = await crew.read(_READ_S)
    # Until it is known better the engine is in none: an update would begin without one.
    kept = await _note(notes, lambda row: replace(observe(row, reading, now()), group=None))
    infos = init_infos(transfer, reading)
    calls = await crew.lines()
    requests = [pb.InitWeightTransferEngineRequest(init_info_json=one) for one in infos]
    answers = await calls.order("InitWeightTransferEngine", requests, timeout_s)
    if any(isinstance(answer, Lost) for answer in answers.values()):
        raise EngineSilent(Silence.DEADLINE)
    if not all(isinstance(answer, Done) for answer in answers.values()):
        raise EngineRefused(first_error(answers))

    def joined(row: Kept) -> Kept:
        same = row.instance_ids == kept.instance_ids
        return replace(row, group=transfer.document() if same else None)

    await _note(notes, joined, wait=True)


async def _note(notes: Notes, change: Callable[[Kept], Kept], *, wait: bool = False) -> Kept:
    """Written between orders: one that is under way would find that its row is gone. `wait` for
    its end. Raises EngineRefused."""
    while True:
        row = await notes.read()
        if row.under_way is not None and not row.abandoned:
            if not wait:
                message = "another order is under way at the engine"
                raise refused("ABORTED", "ENGINE_BUSY", message, retryable=True)
            await asyncio.sleep(_LOOK_AGAIN_S)
            continue
        try:
            return await notes.write(change(row))
        except Overtaken:
            continue
