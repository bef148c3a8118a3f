"""Recorded requests to SGLang, and what the layer answers otherwise on purpose.

`recorded.jsonl` has what SGLang 0.5.23 answered (the whole engine on a CPU, of several runs); its
status is null where the engine ended over the request. Long answers are cut: of settings some are
left, of a validation error its first lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.http.compat.comparing import Calls, Compared, Recording, compare, form_of, table

REASONS: Mapping[str, str] = {
    "fields": "Put together out of what the engine tells this gateway, so that there are fewer "
    "fields. Its settings are not shown.",
    "include": "What it names is not known here anyway, and is passed over.",
    "figures": "Figures are at the gateway's own `/metrics`.",
    "unknown": "The 404 of any path that nobody has thought of.",
    "paused": "A paused engine is alive: SGLang's probe waits for a token for 20 s and then fails.",
    "stale": "SGLang stays unready after a failed probe; here it is what the engine is now.",
    "all": "Whoever names nothing may have misspelt what was meant. Refused.",
    "no_part": "Part of no order here. Refused rather than left out.",
    "deadly": "SGLang ends over it. Refused before it is sent.",
    "nothing": "SGLang ends over it. There is nothing to be taken back, and nothing is sent.",
    "frozen": "SGLang changes the weights and then says that it failed. Requests that are frozen "
    "keep their cache, and the update is what it says.",
    "released": "SGLang says that it is ready, and writes weights where there is no memory. "
    "Refused.",
    "tag": "SGLang answers 200 to a tag that it does not know, and does nothing. Refused.",
    "again": "The same call again, and nothing has come in between: taken for a blind repetition.",
    "pairs": "SGLang takes the tensors that it can pair, and says that all went well. Refused.",
    "dtype": "`torch.bfloat16` is bfloat16: what trainers print is read.",
    "pickled": "Pickled payloads are not passed on.",
    "no_order": "There is no such order. Refused once it is known who calls.",
    "unbacked": "An engine of dialect `openengine` has no such order, so there is no endpoint.",
    "inference": "Sessions belong to inference, which does not go through here.",
    "pinned": "No order keeps an adapter from being evicted. Refused.",
    "name": "A name that a request could not tell from the model, or not at all. Refused.",
    "folder": "Profiles go to the engine's own folder: SGLang ends over one that it can't write. "
    "Refused.",
    "unbegun": "There is nothing to stop: misuse, and not a failure of the server.",
    "double": "The recording's engine is not set up for it; the double is.",
}

DIFFERENCES: Mapping[str, str] = {
    "server_info": "fields",
    "get_server_info": "fields",
    "model_info start": "fields",
    "v1/loads": "fields",
    "v1/loads?include=all": "fields",
    "v1/loads?include=bogus": "include",
    "v1/loads?format=prometheus": "figures",
    "v1/models/nope": "unknown",
    "nope": "unknown",
    "version": "unknown",
    "metrics": "unknown",
    "health paused abort": "paused",
    "ready after continue abort": "stale",
    "abort {}": "all",
    "uwd recapture": "no_part",
    "uwd load_format bogus": "deadly",
    "init group_name empty": "deadly",
    "uwd paused in_place flush_cache default": "frozen",
    "ready released": "released",
    "uwd while weights released": "released",
    "resume all after partial": "nothing",
    "resume again {} (nothing released)": "nothing",
    "release unknown tag": "tag",
    "resume unknown tag": "tag",
    "init same group twice": "again",
    "begin twice": "again",
    "end twice": "again",
    "uwdist good two": "dtype",
    "uwdist lens differ": "pairs",
    "uwt good": "pickled",
    "uwt empty list": "pickled",
    "uwt not a list": "pickled",
    "load_from_tensors garbage": "pickled",
    "uwv": "unbacked",
    "gwbn model.norm.weight": "no_order",
    "wc GET": "no_order",
    "wc checksum": "no_order",
    "wc compare": "no_order",
    "slow_down set": "no_order",
    "slow_down {}": "no_order",
    "set_internal_state ok": "no_order",
    "configure_logging off": "no_order",
    "freeze_gc GET": "no_order",
    "set_trace_level": "no_order",
    "hicache clear": "no_order",
    "hicache attach": "no_order",
    "dump_expert_dist": "no_order",
    "list_external_corpora": "no_order",
    "remote_instance_transfer_engine_info?rank=0": "no_order",
    "open_session id": "inference",
    "load pinned": "pinned",
    "unload p": "pinned",
    "load name = base model": "name",
    "load empty name": "name",
    "load with colon": "name",
    "start_profile": "folder",
    "start_profile twice": "folder",
    "start_profile bad activity": "folder",
    "start_profile bad dir": "folder",
    "stop_profile not started (after)": "unbegun",
    "pd_role_switch": "double",
    "scale_elastic_ep": "double",
    "is_scaling_elastic_ep": "double",
}


def _form(text: str) -> Any:
    """Words are the layer's own."""
    try:
        json.loads(text)
    except ValueError:
        return "text" if text else ""
    return form_of(text)


RECORDING = Recording(Path(__file__).with_name("recorded.jsonl"), DIFFERENCES, _form)


async def compared(
    sglang: Calls, placed: Callable[[str], str] = lambda sent: sent
) -> list[Compared]:
    return await compare(RECORDING, sglang, placed)


def document(rows: list[Compared]) -> str:
    """`docs/sglang-comparison.md`."""
    lines = [
        "# The endpoint layer beside SGLang 0.5.23",
        "",
        "Written by `scripts/gen-sglang-comparison`; a test holds it to what the layer does. Each",
        "row is a request whose answer by SGLang 0.5.23 (the whole engine on a CPU) was recorded,",
        "sent to the layer over an engine double that offers every order. Compared are the status,",
        "the content type and the form of the body; plain text counts as text. `it ended`: the",
        "engine did, over that request. Answers of the layer have more headers (`Cache-Control`,",
        "`X-Request-Id`, …).",
        "",
    ]
    return "\n".join([*lines, *table(rows, "SGLang", REASONS)])
