"""Ending requests: by their ids, which vLLM takes without saying which of them it knew.

Nothing is read back and no record is kept, so every outcome is unverified, and a call whose reply
is lost is not made again: an id could by then belong to another request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from datetime import datetime

from app.backends.port import EngineRefused, Order
from app.backends.vllm.members import Crew
from app.backends.vllm.refusals import refused
from app.backends.vllm.statuses import Refused
from app.backends.vllm.verdicts import first_error
from app.domain.commands import AbortRequests
from app.domain.kinds import AbortOutcome, Verification
from app.domain.operation import JsonObject, JsonValue
from app.domain.transitions import Completed, Fact
from app.rpc.vllm import control_pb2 as pb


async def abort_requests(
    order: Order,
    command: AbortRequests,
    crew: Crew,
    now: Callable[[], datetime],
    timeout_s: float,
) -> AsyncGenerator[Fact, None]:
    """Told to every member: which of them has a request is not known. Raises EngineRefused."""
    if command.all:
        message = "vLLM ends requests by their ids alone"
        raise refused("UNIMPLEMENTED", "UNSUPPORTED_OPERATION", message)
    calls = await crew.make_ready(order, now)
    request = pb.AbortRequest(request_ids=command.request_ids)
    answers = await calls.order("Abort", request, timeout_s)
    if all(isinstance(one, Refused) for one in answers.values()):
        raise EngineRefused(first_error(answers))
    yield all_unverified(command)


def all_unverified(command: AbortRequests) -> Completed:
    requests: list[JsonValue] = [
        {"request_id": each, "outcome": AbortOutcome.UNVERIFIED.value}
        for each in command.request_ids
    ]
    result: JsonObject = {"changed": False, "requests": requests, "all": None}
    return Completed(result=result, verification=Verification.UNVERIFIED)
