"""JSON objects of which two readers cannot see two different things."""

import json
from typing import Any, NoReturn


def json_object(raw: bytes) -> dict[str, Any]:
    """The object in ``raw``. ValueError: it is none, has a member twice, or holds NaN."""
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_no_constant
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member appears twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
