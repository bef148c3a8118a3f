"""The suite can fail: it catches each engine that is wrong on purpose, by the case named for it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from app.conformance.case import Verdict
from app.conformance.catalogue import catalogue
from app.conformance.connection import Listener
from tests.conformance.complete_engine import CompleteEngine
from tests.conformance.judging import (
    complete_engine,
    ids_of,
    judged,
    options_for,
    paced_engine,
    reasons,
)
from tests.conformance.wrong import WrongServer
from tests.conformance.wrong_servers import WRONG_SERVERS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("wrong", WRONG_SERVERS, ids=lambda wrong: wrong.name)
async def test_it_is_caught(wrong: WrongServer, tmp_path: Path) -> None:
    fault = wrong.fault()
    async with AsyncExitStack() as stack:
        given: dict[str, Any] = {}
        if issubclass(wrong.engine, CompleteEngine):
            complete = complete_engine(tmp_path, engine=wrong.engine, interceptors=[fault])
            double, given = await stack.enter_async_context(complete)
        else:
            made = paced_engine(
                tmp_path, make_engine=lambda: wrong.engine(world_size=2), interceptors=[fault]
            )
            double = await stack.enter_async_context(made)
        fault.double = double
        options = options_for(
            double,
            admin=Listener(address=double.admin_address, token=wrong.token),
            patience_s=wrong.patience_s,
            **given,
        )
        for id_ in wrong.caught_by:
            report = await judged(options, id_)
            failed = ids_of(report, Verdict.FAIL)
            assert failed == {id_}, reasons(report, wrong.caught_by)


# Of a right engine that offers little they are not applicable, and no wrong one is needed to show
# that they can fail.
NOT_SHOWN = {"refusal.model-required", "cancel.not-offered"}
# Listeners and credentials are the engine's own, and not in front of it: see test_tokens.
ELSEWHERE = {
    "listener.no-orders",
    "credentials.forged",
    "credentials.refused",
    "credentials.of-inference",
    "credentials.inference-required",
}


def test_every_case_can_fail() -> None:
    caught = {id_ for wrong in WRONG_SERVERS for id_ in wrong.caught_by}
    ids = {case.id for case in catalogue()}
    assert caught <= ids
    assert ids - caught == NOT_SHOWN | ELSEWHERE
