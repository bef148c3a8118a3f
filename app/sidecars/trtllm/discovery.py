"""What a TensorRT-LLM server is and offers, found out without changing anything."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from app.sidecars.answers import Unreadable, field_of, served_models
from app.sidecars.http import EngineHttp, Refused, WrongAnswer
from app.sidecars.trtllm.memory import memory_of

RELEASE, RESTORE, STATUS = "/release_memory", "/resume_memory", "/memory_status"
CONTROL = frozenset({RELEASE, RESTORE, STATUS})
"""The routes that are signed."""
COMPLETIONS = "/v1/completions"
# Answered by POST alone where it is there: a GET is 405 then, else 404, and does nothing.
_ORDERS = (RELEASE, RESTORE, COMPLETIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """`parks`: its memory can be released, and this process has the key to it."""

    version: str
    models: tuple[str, ...]
    generates: bool
    parks: bool


async def discover(http: EngineHttp, *, signed: bool) -> Discovered:
    """Raises NotSent, NoAnswer, WrongAnswer; Refused: a signature that is not taken."""
    try:
        version = field_of(await http.read("/version"), "version", str)
        models = served_models(await http.read("/v1/models"))
        if not models:
            raise Unreadable("it serves no model")
        statuses = await asyncio.gather(*(http.get(path) for path in _ORDERS))
        there = {path for path, one in zip(_ORDERS, statuses, strict=True) if one.status == 405}
        parks = signed and {RELEASE, RESTORE} <= there and await _tells_memory(http)
    except Unreadable as error:
        raise WrongAnswer(f"no TensorRT-LLM server answers there: {error}") from error
    return Discovered(
        version=version,
        models=tuple(model.name for model in models),
        generates=COMPLETIONS in there,
        parks=parks,
    )


async def _tells_memory(http: EngineHttp) -> bool:
    """Servers before it had the other two routes alone: nothing that is done there can be seen."""
    answer = await http.get(STATUS)
    if answer.status in (404, 405):
        return False
    if answer.status != 200:
        raise Refused(answer.status, NOT_TAKEN if answer.status == 401 else "", answer)
    memory_of(answer)
    return True


NOT_TAKEN = (
    "the engine does not take the signature: it has another key or scheme, its clock is more than"
    " 300 s away, or it has had too many signed calls in that time"
)
