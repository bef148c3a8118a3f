"""Recorded requests to vLLM, and what the layer answers otherwise on purpose.

`recorded.jsonl` has what vLLM 0.32.0 answered (its Python server on a CPU). Each row that differs
has its reason in `DIFFERENCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.http.compat.comparing import (
    Calls,
    Compared,
    Recording,
    compare,
    form_of,
    table,
)

REASONS: Mapping[str, str] = {
    "body": "vLLM ignores the body of this endpoint and does something else than it says. Refused.",
    "ids": "vLLM takes what is no list of texts, and counts what it finds in it. Refused with 400.",
    "external": "A cache outside of the engine is no part of any order here.",
    "tag": "vLLM answers 200 to a tag that it does not know, and does nothing. Refused.",
    "state": "The state does not allow it. vLLM answers 500; here it is 409, and no order is sent.",
    "asleep": "vLLM lets its scheduler run on memory that is not there. Refused.",
    "number": "vLLM takes what is no number, or fails over what is no object. Refused with 400.",
    "cpu": "The recording's engine can't do it on a CPU; the double can.",
    "method": "Methods of a caller's choice are not passed on.",
    "checker": "`reset` overwrites weights that serve; other engines have no checksums to ask for.",
    "again": "The same order by the same caller, and the engine is as that left it: taken for a "
    "blind repetition, which succeeds again.",
    "in_place": "Not one order: the adapter would be gone in between if the second half failed.",
    "payload": "What travels is read here before the engine sees it: 400, where vLLM answers 500.",
    "draft": "The recording's engine has no draft model; the double has.",
    "files": "The recording's engine takes weights from a group; the double takes files too.",
    "unbacked": "An engine of dialect `openengine` has no such order, so there is no endpoint.",
}

DIFFERENCES: Mapping[str, str] = {
    "pause.body.ignored": "body",
    "wake.body.ignored": "body",
    "abort.int": "ids",
    "abort.listint": "ids",
    "abort.true": "ids",
    "idle2/reset_prefix_cache?reset_external=true": "external",
    "wake.notsleeping.badtag": "tag",
    "wake.badtag.mixed": "tag",
    "wake.commasep": "tag",
    "kvrelease.notpaused": "state",
    "kvrelease.partial": "state",
    "w.finish.nosession": "state",
    "w.finish.nosession.ver": "state",
    "resume.while.asleep": "asleep",
    "el.list": "number",
    "el.size.True": "number",
    "el.2": "cpu",
    "v.kvrelease": "cpu",
    "rpc.unknown": "method",
    "rpc.health": "method",
    "wc.checksum": "checker",
    "wc.reset": "checker",
    "prof.double": "again",
    "l.dup": "again",
    "u.again": "again",
    "l.inplace": "in_place",
    "w.update.empty": "payload",
    "w.update.after": "payload",
    "w.init.unknown": "payload",
    "w.init.partial": "payload",
    "w.draft": "draft",
    "w.init.empty": "files",
    "w.ver": "unbacked",
}


RECORDING = Recording(
    Path(__file__).with_name("recorded.jsonl"),
    DIFFERENCES,
    # What the configuration of an engine holds is its own.
    partial(form_of, own=("vllm_config",)),
)


async def compared(vllm: Calls, placed: Callable[[str], str] = lambda sent: sent) -> list[Compared]:
    return await compare(RECORDING, vllm, placed)


def document(rows: list[Compared]) -> str:
    """`docs/vllm-comparison.md`."""
    lines = [
        "# The endpoint layer beside vLLM 0.32.0",
        "",
        "Written by `scripts/gen-vllm-comparison`; a test holds it to what the layer does. Each",
        "row is a request whose answer by vLLM 0.32.0 (its Python server) was recorded, sent to",
        "the layer in flavour `0.32` over an engine double that offers every order. Compared are",
        "the status, the content type and the form of the body. Answers of the layer have more",
        "headers (`Cache-Control`, `X-Request-Id`, …).",
        "",
    ]
    return "\n".join([*lines, *table(rows, "vLLM", REASONS)])
