"""A list of engines as people and programs write it: TOML or JSON."""

from __future__ import annotations

import json
import tomllib
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from app.discovery.plan import LABEL
from app.discovery.source import Listed
from app.http.bodies import RegisterEngineBody, sequence

_FAULTS_AT_MOST = 10
_LONGEST_FAULT = 300


class ListRefused(Exception):
    """Nothing of the list counts. `faults` quote no values, but names of fields, which may be
    anything in a list that is broken: log and audit must be able to keep them."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        self.faults = tuple(map(_fit_to_keep, faults))
        super().__init__("; ".join(self.faults))


class _List(BaseModel):
    """`engines` has to be there: an empty file is a broken one, not a fleet without engines."""

    model_config = ConfigDict(strict=True, extra="forbid")

    engines: Annotated[
        tuple[RegisterEngineBody, ...], Field(max_length=10_000), BeforeValidator(sequence)
    ]


def read_list(content: bytes, *, is_json: bool) -> Listed:
    """Each engine in the shape of `POST /v1/engines`. Raises ListRefused."""
    try:
        found = _List.model_validate(_decoded(content, is_json=is_json))
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        raise ListRefused(tuple(map(_line, faults[:_FAULTS_AT_MOST]))) from None
    listed = {}
    for place, engine in enumerate(found.engines):
        if engine.id in listed:
            raise ListRefused((f"engines[{place}].id: {engine.id} is there twice",))
        if LABEL in engine.labels:
            raise ListRefused((f"engines[{place}].labels: {LABEL} is not for a list to set",))
        listed[engine.id] = engine.draft()
    return listed


def _decoded(content: bytes, *, is_json: bool) -> Any:
    try:
        text = content.decode("utf-8")
        return json.loads(text) if is_json else tomllib.loads(text)
    except RecursionError:
        raise ListRefused(("is nested too deeply",)) from None
    except ValueError as error:  # of both formats, and of UTF-8
        what = str(error) if isinstance(error, tomllib.TOMLDecodeError) else type(error).__name__
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} (at line {error.lineno}, column {error.colno})"
        raise ListRefused((f"is not valid {'JSON' if is_json else 'TOML'}: {what}",)) from None


def _line(fault: Any) -> str:
    place = ""
    for part in fault["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    return f"{place or 'the list'}: {fault['msg']}"


def _fit_to_keep(fault: str) -> str:
    """The end says what is wrong with the field that the beginning names."""
    if len(fault) > _LONGEST_FAULT:
        half = _LONGEST_FAULT // 2
        fault = f"{fault[:half]}…{fault[-half:]}"
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in fault)
