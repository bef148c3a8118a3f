"""Requests for engines that divide prefill and decode among themselves."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from app.domain.kinds import EngineRole
from app.reference_engine.handoff import HandoffSettings
from app.reference_engine.limits import CoreSettings
from app.reference_engine.serving import EngineSettings
from app.rpc.openengine.v1 import generation_pb2, kv_pb2
from tests.reference_engine.calling import Clients, Heard
from tests.reference_engine.ranks import nursery

WORDS = tuple(3 + number * 37 % 200 for number in range(75))
_NUMBERS = count()


def settings(
    checkpoint: Path, data_dir: Path, role: EngineRole, *, ranks: int = 1, **handoff: Any
) -> EngineSettings:
    return EngineSettings(
        nursery=nursery(),
        data_dir=data_dir,
        checkpoint=checkpoint,
        insecure_loopback=True,
        core=CoreSettings(torch_threads=1, tensor_parallel_size=ranks),
        role=role,
        handoff=HandoffSettings(**handoff),
        weights_roots=(checkpoint.parent.parent,),
        stop_grace_s=0.0,
    )


def request(
    session: kv_pb2.KvSessionRef | None = None,
    *,
    words: tuple[int, ...] = WORDS,
    temperature: float = 0.0,
    max_tokens: int = 24,
) -> generation_pb2.GenerateRequest:
    made = generation_pb2.GenerateRequest(request_id=f"request-{next(_NUMBERS)}")
    made.token_ids.ids.extend(words)
    made.sampling.temperature = temperature
    made.sampling.seed = 11
    made.stopping.max_tokens = max_tokens
    made.stopping.ignore_eos = True
    if session is not None:
        made.kv.session.CopyFrom(session)
    return made


async def prefilled(clients: Clients, **options: Any) -> kv_pb2.KvSessionRef:
    heard = await clients.send(request(**options)).whole()
    assert heard.session is not None, heard
    assert heard.usage is not None
    assert heard.usage.completion_tokens == 0
    assert (heard.tokens, heard.finished, heard.error) == (0, None, None)
    return heard.session


async def continued(clients: Clients, session: kv_pb2.KvSessionRef | None, **options: Any) -> Heard:
    return await clients.send(request(session, **options)).whole()
