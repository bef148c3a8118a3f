"""What an engine's events say, held to what callers may rely on."""

from __future__ import annotations

import pytest

from app.backends.letters import fact_of
from app.domain.kinds import OperationKind
from app.domain.transitions import Failed, Warned
from app.rpc.openengine.v1 import admin_pb2


@pytest.mark.parametrize(
    ("said", "kept"),
    [("RANK_LOST", "RANK_LOST"), ("", "UNSPECIFIED"), ("X \x1b[31m INJECT", "UNSPECIFIED")],
)
def test_only_a_stable_word_is_a_reason(said: str, kept: str) -> None:
    failed = admin_pb2.AdminOperationEvent(
        operation_id="e-1", sequence=2, failed=admin_pb2.OperationFailed(code=13, reason=said)
    )
    warning = admin_pb2.AdminOperationEvent(
        operation_id="e-1", sequence=2, warning=admin_pb2.OperationWarning(reason=said)
    )
    end, warned = (fact_of(event, OperationKind.PAUSE) for event in (failed, warning))
    assert isinstance(end, Failed)
    assert end.error.reason == kept
    assert isinstance(warned, Warned)
    assert warned.warning.reason == kept
