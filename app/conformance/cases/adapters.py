"""Adapters, through the core Control service on the admin listener."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from app.conformance.case import Case, Need, NotApplicable, NotGiven, NotHeld, case, expect
from app.conformance.client import brief
from app.conformance.record import Refusal
from app.conformance.traffic import Generation, TooShort
from app.conformance.trial import IN_THE_MIDST_S, Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lora_pb2

_OUTSIDE = ("/", "/etc", "/proc/self", "/nowhere/../etc")
_AT_ONCE = 4
# An unload that waited may be answered before the last token of the request has been read.
_IN_TRANSIT_S = 0.5
_C = grpc.StatusCode


def _require(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_LOAD_LORA, pb.ADMIN_OPERATION_KIND_UNLOAD_LORA)


async def _path(trial: Trial) -> str:
    """Of an adapter that can be loaded. Raises NotApplicable."""
    _require(trial)
    if trial.options.lora is None:
        raise NotGiven("needs --lora PATH, an adapter which the engine can load")
    loaded = len((await trial.client.profile()).state.loras)
    if trial.lora_limit and loaded >= trial.lora_limit:
        raise NotApplicable("as many adapters are loaded as may be, and none of them is the run's")
    return trial.options.lora


def _load(trial: Trial, path: str, name: str = "", number: int = 0) -> Any:
    adapter = lora_pb2.LoraAdapter(lora_name=name or trial.prefix, source_path=path, lora_id=number)
    return trial.client.of_control("LoadLora", lora_pb2.LoadLoraRequest(adapter=adapter))


def _unload(trial: Trial, name: str = "") -> Any:
    request = lora_pb2.UnloadLoraRequest(lora_name=name or trial.prefix)
    return trial.client.of_control("UnloadLora", request)


async def _listed(trial: Trial) -> dict[str, lora_pb2.LoraAdapter]:
    """As the list tells them, which has to be what the profile tells."""
    answer = await trial.client.of_control("ListLoras", lora_pb2.ListLorasRequest())
    if isinstance(answer, Refusal):
        raise NotHeld("adapters to be listed", str(answer))
    listed = {adapter.lora_name: adapter for adapter in answer.adapters}
    state = (await trial.client.profile()).state
    shown = {adapter.lora_name: adapter for adapter in state.loras}
    expect(listed == shown, "the profile to show what is listed", f"{listed} and {shown}")
    return listed


async def _loaded(trial: Trial) -> lora_pb2.LoraAdapter:
    answer = await _load(trial, await _path(trial))
    if isinstance(answer, Refusal):
        raise NotHeld("the adapter to be loaded", str(answer))
    adapter = answer.adapter
    assert isinstance(adapter, lora_pb2.LoraAdapter)
    return adapter


async def _revision(trial: Trial) -> int:
    return (await trial.client.profile()).revision


@case(
    "lora.round",
    "A loaded adapter is listed, with the name and path that were ordered and a number, and is gone"
    " when it is unloaded; each of both raises the revision.",
)
async def there_and_back(trial: Trial) -> None:
    path = await _path(trial)
    first = await _revision(trial)
    adapter = await _loaded(trial)
    wanted = (trial.prefix, path)
    expect((adapter.lora_name, adapter.source_path) == wanted, f"adapter {wanted}", brief(adapter))
    expect(adapter.lora_id > 0, "a number above 0", adapter.lora_id)
    found = (await _listed(trial)).get(trial.prefix)
    expect(found == adapter, f"{brief(adapter)} to be listed", found)
    second = await _revision(trial)
    expect(second > first, f"a revision above {first}", second)
    gone = await _unload(trial)
    expect(not isinstance(gone, Refusal), "the adapter to be unloaded", gone)
    expect(gone.adapter == adapter, f"{brief(adapter)} to be told", brief(gone))
    expect(trial.prefix not in await _listed(trial), "the adapter to be gone", "it is listed")
    third = await _revision(trial)
    expect(third > second, f"a revision above {second}", third)


@case(
    "lora.repeated",
    "Loading the same adapter again answers already_loaded and changes nothing.",
)
async def repeated(trial: Trial) -> None:
    adapter = await _loaded(trial)
    async with trial.unchanged("a load of what is loaded"):
        again = await _load(trial, adapter.source_path)
        same = not isinstance(again, Refusal) and again.adapter == adapter
        expect(same, f"the same adapter: {brief(adapter)}", brief(again))
        expect(again.already_loaded, "already_loaded", brief(again))


@case(
    "lora.another-source",
    "A name stands for one adapter: the same name with another path or number is ALREADY_EXISTS,"
    " and what is loaded stays.",
)
async def another_source(trial: Trial) -> None:
    adapter = await _loaded(trial)
    async with trial.unchanged("a load of another adapter under the same name"):
        for answer in (
            await _load(trial, f"{adapter.source_path}/../another"),
            await _load(trial, adapter.source_path, number=adapter.lora_id + 1),
        ):
            refused = isinstance(answer, Refusal) and answer.code is _C.ALREADY_EXISTS
            expect(refused, "ALREADY_EXISTS", answer)


@case(
    "lora.single-flight",
    "The same load given several times at once is one load: each caller is told of the same"
    " adapter, and the revision rises once.",
)
async def single_flight(trial: Trial) -> None:
    path = await _path(trial)
    first = await _revision(trial)
    answers = await asyncio.gather(*(_load(trial, path) for _ in range(_AT_ONCE)))
    refused = [answer for answer in answers if isinstance(answer, Refusal)]
    expect(not refused, "every caller to be told of the adapter", refused)
    told = {(answer.adapter.lora_name, answer.adapter.lora_id) for answer in answers}
    expect(len(told) == 1, "one adapter", told)
    found = await _revision(trial)
    expect(found == first + 1, f"revision {first + 1}", found)


@case(
    "lora.nowhere",
    "An adapter that is not there, or not below the engine's allowed roots, is refused or fails,"
    " and nothing is changed.",
)
async def nowhere(trial: Trial) -> None:
    _require(trial)
    for path in (f"/nowhere/{trial.prefix}", *_OUTSIDE):
        async with trial.unchanged("a load that fails"):
            answer = await _load(trial, path)
            expect(isinstance(answer, Refusal), f"{path} not to be loaded", brief(answer))


@case(
    "lora.malformed",
    "A load or unload without a name, or a load without a path, is INVALID_ARGUMENT.",
)
async def malformed(trial: Trial) -> None:
    _require(trial)
    adapter = lora_pb2.LoraAdapter(source_path="/nowhere")
    control = trial.client.of_control
    async with trial.unchanged("calls that say too little"):
        for answer in (
            await control("LoadLora", lora_pb2.LoadLoraRequest(adapter=adapter)),
            await _load(trial, ""),
            await control("UnloadLora", lora_pb2.UnloadLoraRequest()),
        ):
            refused = isinstance(answer, Refusal) and answer.code is _C.INVALID_ARGUMENT
            expect(refused, "INVALID_ARGUMENT", answer)


@case(
    "lora.unload-unknown",
    "Unloading what is not loaded is NOT_FOUND, and nothing is changed.",
)
async def unload_unknown(trial: Trial) -> None:
    _require(trial)
    async with trial.unchanged("an unload of what is not loaded"):
        answer = await _unload(trial)
        refused = isinstance(answer, Refusal) and answer.code is _C.NOT_FOUND
        expect(refused, "NOT_FOUND", answer)


@asynccontextmanager
async def _using(trial: Trial, seconds: float) -> AsyncGenerator[Generation]:
    """While a request runs under the adapter."""
    async with trial.traffic.running(seconds, lora=trial.prefix) as generation:
        if generation.end is not None:
            raise TooShort
        yield generation


@case(
    "lora.in-use",
    "An adapter is not taken from under a request: unloading it is refused or fails while a request"
    " uses it, or waits for the request; the request runs to its own end either way.",
    Need.INFERENCE,
)
async def in_use(trial: Trial) -> None:
    await _loaded(trial)
    async with _using(trial, IN_THE_MIDST_S) as generation:
        answer = await _unload(trial)
        if isinstance(answer, Refusal):
            listed = await _listed(trial)
            expect(trial.prefix in listed, "the adapter to stay", sorted(listed))
        else:
            await generation.over(_IN_TRANSIT_S, "before its adapter is unloaded")
        await generation.over(trial.patience_s, "by itself")
        expect(generation.whole, "the request to run to its own end", generation)
    if isinstance(answer, Refusal):
        answer = await _unload(trial)
        expect(not isinstance(answer, Refusal), "an idle adapter to be unloaded", answer)


@case(
    "lora.unknown-to-a-request",
    "A request that names an adapter which is not loaded is refused; it is never computed without.",
    Need.INFERENCE,
)
async def unknown_to_a_request(trial: Trial) -> None:
    _require(trial)
    generation = trial.traffic.ask(4, lora=trial.prefix)
    await generation.over(trial.patience_s, "with a refusal")
    refused = generation.refusal is not None and not generation.tokens
    expect(refused, "a refusal before the first token", generation)


@case(
    "lora.others-unchanged",
    "Requests that name no adapter are answered as before while one is loaded and used.",
    Need.INFERENCE,
)
async def others_unchanged(trial: Trial) -> None:
    path = await _path(trial)
    before = await _answer(trial)
    await _load(trial, path)
    async with _using(trial, IN_THE_MIDST_S):
        beside = await _answer(trial)
    expect(beside == before, f"the answer {before[:80]!r}", beside[:80])


async def _answer(trial: Trial) -> str:
    generation = trial.traffic.ask(16)
    await generation.over(trial.patience_s, "while admission is open")
    expect(generation.whole, "an answer", generation)
    return generation.text


CASES: tuple[Case, ...] = (
    there_and_back,
    repeated,
    another_source,
    single_flight,
    nowhere,
    malformed,
    unload_unknown,
    in_use,
    unknown_to_a_request,
    others_unchanged,
)
