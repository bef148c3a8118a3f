"""What scripts/check-openapi takes for a break of the HTTP API, and what not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = json.loads((ROOT / "docs" / "openapi.json").read_text())
PAUSE = "/v1/engines/{engine}/pause"

Document = dict[str, Any]
Change = Callable[[Document], object]


def breaks(old: Document, new: Document) -> list[str]:
    loader = SourceFileLoader("check_openapi", str(ROOT / "scripts" / "check-openapi"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return list(module.breaks(old, new))


def schema(document: Document, name: str) -> Any:
    return document["components"]["schemas"][name]


def pause(document: Document) -> Any:
    return document["paths"][PAUSE]["post"]


def parameter(document: Document, name: str) -> Any:
    return next(one for one in pause(document)["parameters"] if one["name"] == name)


BREAKS: dict[str, tuple[Change, str]] = {
    "path": (lambda d: d["paths"].pop(PAUSE), f"POST {PAUSE}: gone"),
    "method": (lambda d: d["paths"]["/v1/engines"].pop("post"), "POST /v1/engines: gone"),
    "answer": (lambda d: pause(d)["responses"].pop("202"), "answers 202 no more"),
    "form": (
        lambda d: d["paths"]["/v1/events"]["get"]["responses"]["200"]["content"].pop(
            "text/event-stream"
        ),
        "text/event-stream no more",
    ),
    "parameter": (
        lambda d: pause(d)["parameters"].remove(parameter(d, "Prefer")),
        "parameter Prefer gone",
    ),
    "demanded parameter": (
        lambda d: parameter(d, "Prefer").update(required=True),
        "parameter Prefer is demanded now",
    ),
    "new demanded field": (
        lambda d: schema(d, "PauseBody")["required"].append("reason"),
        "body.reason: is demanded now",
    ),
    "field of a body": (
        lambda d: schema(d, "PauseBody")["properties"].pop("reason"),
        "reason: gone",
    ),
    "value": (lambda d: schema(d, "PauseMode")["enum"].remove("keep"), "takes keep no more"),
    "type": (
        lambda d: schema(d, "ResumeBody")["properties"].update(pause_epoch={"type": "string"}),
        "integer has become string",
    ),
    "bound": (
        lambda d: schema(d, "FreezeBody")["properties"]["reason"].update(maxLength=3),
        "maxLength is 3 now",
    ),
    "field of an answer": (
        lambda d: schema(d, "OperationDocument")["properties"].pop("state"),
        "state: gone",
    ),
    "field of an answer that may be absent": (
        lambda d: schema(d, "OperationDocument")["required"].remove("state"),
        "state: may be absent now",
    ),
}

HARMLESS: dict[str, Change] = {
    "nothing": lambda d: None,
    "new path": lambda d: d["paths"].update({"/v1/more": d["paths"]["/v1/me"]}),
    "new answer": lambda d: pause(d)["responses"].update({"418": {"description": "short"}}),
    "new field": lambda d: schema(d, "PauseBody")["properties"].update(more={"type": "string"}),
    "new value": lambda d: schema(d, "PauseMode")["enum"].append("later"),
    "wider bound": lambda d: schema(d, "FreezeBody")["properties"]["reason"].update(maxLength=9999),
    "new field of an answer": lambda d: schema(d, "OperationDocument")["properties"].update(
        more={"type": "string"}
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_found(name: str) -> None:
    change, said = BREAKS[name]
    new = copy.deepcopy(DOCUMENT)
    change(new)
    found = breaks(DOCUMENT, new)
    assert any(said in line for line in found), found


@pytest.mark.parametrize("name", HARMLESS)
def test_what_breaks_nobody_passes(name: str) -> None:
    new = copy.deepcopy(DOCUMENT)
    HARMLESS[name](new)
    assert breaks(DOCUMENT, new) == []
