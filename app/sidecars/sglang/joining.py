"""A trainer's process group: going there, being in it, leaving.

The engine joins in its scheduler, which stands still until all members are there, and for ever if
one never comes; nothing at its server ends that wait. So a trainer has to listen before the engine
is sent to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from app.domain.weight_sessions import NcclTransfer
from app.domain.weight_sources import DistributedWeights
from app.enginekit.rendezvous import RendezvousRefused, resolved
from app.enginekit.runtime import RuntimeFault
from app.sidecars.faults import told
from app.sidecars.sglang.answers import succeeded
from app.sidecars.sglang.engine import SglangEngine

_RETRY_S = 0.25
_CONNECT_S = 2.0
_LEAVE_S = 5.0
_MARGIN_S = 2.0
# Of a group that is joined before any update: by then its trainer has given up too.
_JOIN_S = 1800.0
# For it to listen. Meanwhile no other group is joined: somebody who mistook the port tries again.
_MEET_S = 120.0
# For the others to come once the engine is there, before it is told that it answers nobody.
_GATHER_S = 60.0


class Meeting:
    """`way`: where the group is, and who is in it."""

    def __init__(self, engine: SglangEngine, way: DistributedWeights | NcclTransfer) -> None:
        self._engine = engine
        self._way = way
        self._address = way.address

    async def check(self) -> None:
        """Raises RuntimeFault."""
        way, why = self._way, ""
        if not way.group:
            why = "name the group: the engine ends over one without a name"
        elif way.source_rank:
            why = "the engine receives from rank 0"
        elif not way.rank_offset:
            why = "the trainer is rank 0, and the engine behind it"
        if why:
            raise RuntimeFault("TRANSFER_NOT_OFFERED", why, code="INVALID_ARGUMENT")
        rules = self._engine.allowed.rendezvous
        try:
            self._address = await asyncio.to_thread(resolved, rules, way.address, way.port)
        except RendezvousRefused as refused:
            raise RuntimeFault(
                "RENDEZVOUS_NOT_ALLOWED", str(refused), code="INVALID_ARGUMENT"
            ) from refused

    async def met(self, left_s: Callable[[], float]) -> None:
        """Whether the trainer listens where the group is to be; it is waited for. Raises
        RuntimeFault."""
        while True:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    _, writer = await asyncio.open_connection(self._address, self._way.port)
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
                return
            except OSError:  # TimeoutError is one
                if left_s() <= _MARGIN_S:
                    raise RuntimeFault(
                        "TRAINER_NOT_THERE",
                        "nobody listens where the trainer was to be: the engine was not sent there",
                        retryable=True,
                    ) from None
                await asyncio.sleep(_RETRY_S)

    async def join(self, within_s: float, *, gather_s: float = _GATHER_S) -> None:
        """Of an earlier group by that name nothing is left. Raises RuntimeFault. Without an answer
        the scheduler may be stuck for good: so its silence is no secret after `gather_s`."""
        engine, way = self._engine, self._way
        if engine.group is not None:
            await leave(engine, engine.group.group)
        await leave(engine, way.group)
        body = {
            "master_address": self._address,
            "master_port": way.port,
            "rank_offset": way.rank_offset,
            "world_size": way.world_size,
            "group_name": way.group,
            "backend": way.backend.value,
        }
        engine.occupied = True
        loop = asyncio.get_running_loop()
        excused = loop.call_later(gather_s, lambda: setattr(engine, "occupied", False))
        try:
            answer = await engine.post("/init_weights_update_group", body=body, within_s=within_s)
            with told():
                succeeded(answer)
        except RuntimeFault as fault:
            if fault.reason == "ENGINE_NOT_ANSWERING":
                raise RuntimeFault(
                    "GROUP_NOT_COMPLETE",
                    "the group did not become complete: the engine waits for the other members in"
                    " the midst of its work, and may have to be started anew",
                ) from fault
            raise
        finally:
            excused.cancel()
            engine.occupied = False


async def leave(engine: SglangEngine, name: str) -> None:
    """Of a group that it is not in too. Raises RuntimeFault."""
    body = {"group_name": name}
    try:
        await engine.post("/destroy_weights_update_group", body=body, within_s=_LEAVE_S)
    except RuntimeFault as fault:
        if fault.reason != "ENGINE_REFUSED":
            raise
    if engine.group is not None and engine.group.group == name:
        engine.group = None


async def join_group(
    engine: SglangEngine,
    transfer: NcclTransfer,
    *,
    meet_s: float = _MEET_S,
    gather_s: float = _GATHER_S,
) -> None:
    """To stay there over as many updates as come. Raises RuntimeFault."""
    loop = asyncio.get_running_loop()
    gives_up_at = loop.time() + meet_s
    meeting = Meeting(engine, transfer)
    await meeting.check()
    await meeting.met(lambda: gives_up_at - loop.time())
    await meeting.join(_JOIN_S, gather_s=gather_s)
    engine.group = transfer
