"""What may be read is the operator's to say."""

from __future__ import annotations

from pathlib import Path

import pytest
from chadburn_vllm.options import Options, read_options


def test_from_the_environment(tmp_path: Path) -> None:
    found = read_options(
        {}, {"CHADBURN_VLLM_ROOTS": f"{tmp_path}:/", "CHADBURN_VLLM_REFERENCE": "/r"}
    )
    assert found == Options((str(tmp_path), "/"), "/r")


def test_the_configuration_wins(tmp_path: Path) -> None:
    config = {"disk_weights": {"roots": [str(tmp_path)]}, "another": 1}
    assert read_options(config, {"CHADBURN_VLLM_ROOTS": "/"}) == Options((str(tmp_path),), None)


def test_a_link_is_followed_once_and_for_all(tmp_path: Path) -> None:
    (tmp_path / "now").symlink_to("/usr")
    assert read_options({}, {"CHADBURN_VLLM_ROOTS": str(tmp_path / "now")}).roots == ("/usr",)


@pytest.mark.parametrize(
    ("config", "environment", "said"),
    [
        ({}, {}, "no root of weights is allowed"),
        (None, {"CHADBURN_VLLM_ROOTS": ":"}, "no root of weights is allowed"),
        ({}, {"CHADBURN_VLLM_ROOTS": "weights"}, "must be absolute paths of folders"),
        ({}, {"CHADBURN_VLLM_ROOTS": "/not/there"}, "must be absolute paths of folders"),
        ({"disk_weights": {"roots": "/"}}, {}, "must be absolute paths of folders"),
        ({"disk_weights": {"root": ["/"]}}, {}, 'takes "roots" and "reference" alone'),
        ({"disk_weights": {"roots": ["/"], "reference": 1}}, {}, "must be a path"),
    ],
)
def test_what_does_not_let_the_engine_start(
    config: object, environment: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read_options(config, environment)
