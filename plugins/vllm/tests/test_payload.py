"""The payload is a contract with its callers."""

from __future__ import annotations

import pytest
from chadburn_vllm.payload import Refused, Update, read_init, read_update

DIGEST = "ab" * 32


def test_a_path_is_enough() -> None:
    assert read_update({"path": "/srv/one"}) == Update("/srv/one", None, False)


def test_all_of_it() -> None:
    given = {"path": "/srv", "files": {"model.safetensors": DIGEST}, "check_finite": True}
    assert read_update(given) == Update("/srv", {"model.safetensors": DIGEST}, True)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"path": 1},
        {"path": ""},
        {"path": "relative/one"},
        {"path": "/srv/\0one"},
        {"path": "/srv", "delay": 1},
        {"path": "/srv", "check_finite": 1},
        {"path": "/srv", "check_finite": "yes"},
        {"path": "/srv", "files": []},
        {"path": "/srv", "files": {}},
        {"path": "/srv", "files": {"model.safetensors": None}},
        {"path": "/srv", "files": {"model.safetensors": DIGEST.upper()}},
        {"path": "/srv", "files": {"model.safetensors": DIGEST[1:]}},
        {"path": "/srv", "files": {"../model.safetensors": DIGEST}},
        {"path": "/srv", "files": {"model.bin": DIGEST}},
    ],
)
def test_anything_else_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(Refused, match="update_info"):
        read_update(given)


def test_nothing_is_said_at_the_start() -> None:
    read_init({})
    with pytest.raises(Refused, match="init_info has unknown fields: 'roots'"):
        read_init({"roots": ["/"]})
