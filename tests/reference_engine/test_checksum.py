"""The checksum that is taken while tensors come is that of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.reference_engine.host_memory import RunningChecksum, sha256_of

NAMES = st.lists(st.text("ab.19", min_size=1, max_size=6), min_size=1, max_size=8, unique=True)


@given(data=st.data(), names=NAMES)
def test_it_is_the_same_in_whatever_order_they_come(data: st.DataObject, names: list[str]) -> None:
    tensors = {name: torch.full((n, 2), float(n)) for n, name in enumerate(names)}
    with RunningChecksum(names) as running:
        for name in data.draw(st.permutations(names)):
            running.take(name, tensors[name])
        assert running.hexdigest(lambda: None) == sha256_of(tensors)


def test_a_change_of_one_element_is_another_checksum() -> None:
    found = set()
    for number in range(2):
        with RunningChecksum(["a"]) as running:
            running.take("a", torch.tensor([1.0, float(number)]))
            found.add(running.hexdigest(lambda: None))
    assert len(found) == 2


def test_waiting_for_it_can_be_stopped() -> None:
    class Stop(Exception):
        pass

    def proceed() -> None:
        raise Stop

    with RunningChecksum(["a"]) as running:
        running.take("a", torch.zeros(1))
        with pytest.raises(Stop):
            running.hexdigest(proceed)
