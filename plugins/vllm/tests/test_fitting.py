"""Only a checkpoint of the served model is one."""

from __future__ import annotations

import pytest
from chadburn_vllm.fitting import must_fit
from chadburn_vllm.header import Tensor
from chadburn_vllm.payload import Refused


def tensor(dtype: str = "BF16", *shape: int) -> Tensor:
    return Tensor(dtype, shape, 0, 0)


MODEL = {"q": tensor("BF16", 4, 4), "k": tensor("BF16", 4, 2)}


def test_the_same_in_another_order_and_elsewhere() -> None:
    must_fit({"k": Tensor("BF16", (4, 2), 9, 25), "q": MODEL["q"]}, MODEL)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ({"q": MODEL["q"]}, "missing: k"),
        (MODEL | {"v": tensor()}, "unknown to the model: v"),
        (MODEL | {"k": tensor("BF16", 2, 4)}, r"k \(BF16 \[2, 4\], the model's is BF16 \[4, 2\]\)"),
        (MODEL | {"k": tensor("F32", 4, 2)}, r"k \(F32 \[4, 2\], the model's is BF16"),
    ],
)
def test_what_differs_is_named(new: dict[str, Tensor], said: str) -> None:
    with pytest.raises(Refused, match=said):
        must_fit(new, MODEL)


def test_a_wholly_other_model_is_told_in_a_line() -> None:
    with pytest.raises(Refused) as refused:
        must_fit({f"x{number}": tensor() for number in range(900)}, MODEL)
    assert "missing: k, q;" in str(refused.value)
    assert "and 895 more" in str(refused.value)
    assert len(str(refused.value)) < 200
