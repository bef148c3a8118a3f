"""The scripted engine that also joins a trainer's group before any update."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from app.domain.commands import UpdateWeights
from app.domain.weight_sessions import NcclTransfer, SessionWeights
from app.enginekit.runtime import Order, RuntimeFault
from tests.enginekit.session_engine import SessionEngine


class JoiningEngine(SessionEngine):
    """`joined`: every time that it went to a trainer, by itself or with a session. `listening`:
    whether the trainer is there; nothing else lets it in."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.offered = replace(self.offered, weight_sessions=frozenset({"nccl", "disk"}))
        self.joined: list[NcclTransfer] = []
        self.group: NcclTransfer | None = None
        self.listening = asyncio.Event()
        self.refuses = False

    async def join_group(self, transfer: NcclTransfer) -> None:
        self.group = None
        self.joined.append(transfer)
        if self.refuses:
            raise RuntimeFault("NOT_ALLOWED", "not there", code="INVALID_ARGUMENT")
        await self.listening.wait()
        self.group = transfer

    async def open_session(self, order: Order, rank: int) -> None:
        await super().open_session(order, rank)
        match order.command:
            case UpdateWeights(source=SessionWeights(transfer=NcclTransfer() as way)):
                if self.group != way:
                    raise RuntimeFault("TRAINER_NOT_THERE", "it listens no more")
