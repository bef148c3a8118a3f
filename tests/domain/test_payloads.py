"""What goes with an order beside its document, and the label that goes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from app.domain.capabilities import Capabilities, Limits
from app.domain.commands import (
    Command,
    PauseAround,
    SetWeightVersion,
    UpdateWeights,
    command_of,
)
from app.domain.errors import InvalidArgument, UnsupportedOperation, WeightsNotValid
from app.domain.facts import EngineFacts
from app.domain.kinds import (
    CachePolicy,
    Component,
    OperationKind,
    PauseMode,
    TensorDtype,
    WeightSourceKind,
    WeightsState,
)
from app.domain.weight_sources import InlineTensor, InlineWeights, TensorSpec
from tests.domain.strategies import commands, engine_facts, updates

FIRST = TensorSpec("a", TensorDtype.FLOAT32, (2,))
SECOND = TensorSpec("b", TensorDtype.UINT8, (3,))
INLINE = InlineWeights(
    (InlineTensor.carrying(FIRST, b"12345678"), InlineTensor.carrying(SECOND, b"abc"))
)
UPDATE = UpdateWeights(
    source=INLINE,
    weight_version="v2",
    cache_policy=CachePolicy.FLUSH,
    admission=PauseAround(PauseMode.DRAIN),
)
CAN = Capabilities(
    operations=frozenset({OperationKind.UPDATE_WEIGHTS}),
    weight_sources=frozenset({WeightSourceKind.INLINE}),
    cache_policies=frozenset(CachePolicy),
    components=frozenset(Component),
    pause_modes=frozenset(PauseMode),
    new_requests=frozenset({"hold"}),  # type: ignore[arg-type]
)


@given(updates)
def test_an_update_is_what_its_document_says(order: UpdateWeights) -> None:
    """By itself: among all orders one of each source and admission is rare."""
    assert command_of(order.kind, order.document()) == order


@given(commands)
def test_an_order_is_whole_again_with_its_payload(command: Command) -> None:
    again = command_of(command.kind, command.document())
    assert again.lacks_payload is (command.payload is not None)
    if command.payload is None:
        with pytest.raises(ValueError, match=r"carries nothing|go with the order"):
            again.carrying(b"")
        return
    whole = again.carrying(command.payload)
    assert (whole, whole.payload, whole.lacks_payload) == (command, command.payload, False)


def test_its_own_payload_is_taken() -> None:
    whole = command_of(UPDATE.kind, UPDATE.document()).carrying(b"12345678abc")
    assert whole == UPDATE
    assert whole.payload == b"12345678abc"


@pytest.mark.parametrize("payload", [b"", b"12345678ab", b"12345678abcd", b"12345678abd"])
def test_another_payload_is_not_taken_for_it(payload: bytes) -> None:
    again = command_of(UPDATE.kind, UPDATE.document())
    with pytest.raises(ValueError, match="the content"):
        again.carrying(payload)


def test_tensors_have_to_fit_into_one_message() -> None:
    for limit, fits in ((0, True), (1 << 20, True), (11, False), (4096, False)):
        can = replace(CAN, limits=Limits(max_message_bytes=limit))
        if fits:
            UPDATE.check_supported(can)
            continue
        with pytest.raises(InvalidArgument) as refused:
            UPDATE.check_supported(can)
        (fault,) = refused.value.faults
        assert fault.pointer == "/source/tensors/inline/tensors"
        assert str(limit) in fault.detail


@pytest.mark.parametrize("version", ["", "a\nb", "x" * 257])
def test_a_label_is_one_line(version: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        SetWeightVersion(weight_version=version)
    assert refused.value.faults[0].pointer == "/weight_version"


@given(engine_facts)
def test_a_label_is_for_valid_weights_alone(facts: EngineFacts) -> None:
    order = SetWeightVersion(weight_version="v2", model="tiny")
    assert command_of(order.kind, order.document()) == order
    if facts.weights.state is WeightsState.VALID:
        order.check_state(facts)
        return
    with pytest.raises(WeightsNotValid):
        order.check_state(facts)


def test_a_label_takes_an_engine_that_can_be_told() -> None:
    with pytest.raises(UnsupportedOperation):
        SetWeightVersion(weight_version="v2").check_supported(CAN)
