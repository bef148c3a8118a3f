"""Orders that must not be accepted, since they are malformed or ask for what is not offered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from app.conformance import sources
from app.conformance.case import Case, NotApplicable, NotPromised, case, expect
from app.conformance.client import brief
from app.conformance.orders import UNKNOWN_NUMBER, named
from app.conformance.record import Refusal
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT
_KEYS = ("", "k" * 129, "ключ", "tab\tinside", "line\ninside")
_LARGEST_TRIED = 512 * 1024 * 1024
_FRAME = 1024


def selecting(trial: Trial, number: Any) -> Iterator[Any]:
    """Each selector of each offered order, set to that number; all else is well-formed."""
    orders, offers, K = trial.orders, trial.offers, pb.AdminOperationKind  # noqa: N806
    if offers(K.ADMIN_OPERATION_KIND_FLUSH_CACHES):
        yield orders.flush(caches=[number])
        yield orders.flush(caches=[*trial.profile.cache_kinds[:1], number])
    if offers(K.ADMIN_OPERATION_KIND_PAUSE):
        yield orders.pause(number)
        yield trial.pause(new_requests=number)
    if offers(K.ADMIN_OPERATION_KIND_RELEASE_RESOURCES):
        for field in ({"resources": [number]}, {"content": number}, {"drain": number}):
            yield orders.release(**field)
    if offers(K.ADMIN_OPERATION_KIND_RESTORE_RESOURCES):
        yield orders.restore(max(1, trial.profile.release_epoch), resources=[number])
    if offers(K.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS):
        yield orders.update("/nowhere", cache_policy=number)
        yield orders.update("/nowhere", components=[number])
        yield orders.update("/nowhere", pause=pb.PauseAround(mode=number))
        mode = (*trial.profile.pause_modes, pb.PAUSE_MODE_DRAIN)[0]
        around = pb.PauseAround(mode=mode, new_requests=number)
        yield orders.update("/nowhere", pause=around)
        offered = trial.profile.weight_sources
        if pb.WEIGHT_SOURCE_KIND_INLINE in offered:
            yield orders.load(tensors=sources.inline(number))
        if pb.WEIGHT_SOURCE_KIND_DISTRIBUTED in offered:
            yield orders.load(distributed=sources.distributed(trial.profile.world_size, number))
    if offers(K.ADMIN_OPERATION_KIND_PROFILE):
        yield orders.start_profile(kind=number)
    if offers(K.ADMIN_OPERATION_KIND_RECONFIGURE_SERVING):
        yield orders.reconfigure(role=number)
        yield orders.reconfigure(max_running_requests=8, drain=number)


def _empty(trial: Trial) -> Iterator[Any]:
    orders, offers, K = trial.orders, trial.offers, pb.AdminOperationKind  # noqa: N806
    if offers(K.ADMIN_OPERATION_KIND_FLUSH_CACHES):
        yield orders.flush(caches=[])
    if offers(K.ADMIN_OPERATION_KIND_RESUME):
        yield orders.resume(0)
    if offers(K.ADMIN_OPERATION_KIND_RELEASE_RESOURCES):
        yield orders.release(resources=[])
    if offers(K.ADMIN_OPERATION_KIND_RESTORE_RESOURCES):
        yield orders.restore(max(1, trial.profile.release_epoch), resources=[])
        yield orders.restore(0, resources=[trial.profile.resources[0].kind])
    if offers(K.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS):
        yield orders.update("")
        yield orders.update("/nowhere", disk=None)
        yield orders.update("/nowhere", components=[])
        yield orders.update("/nowhere", pause=None)
    if offers(K.ADMIN_OPERATION_KIND_PROFILE):
        yield orders.start_profile(duration_ms=0)
        yield orders.start_profile(steps=0)
        yield orders.stop_profile("")
    if offers(K.ADMIN_OPERATION_KIND_RECONFIGURE_SERVING):
        yield orders.reconfigure()


async def _all_refused(trial: Trial, requests: Iterator[Any], *codes: grpc.StatusCode) -> None:
    tried = 0
    for request in requests:
        tried += 1
        async with trial.unchanged(f"the refused {brief(request) or 'order'}"):
            await trial.client.refused(request, *codes)
    if not tried:
        raise NotPromised("the profile offers no order with a selector")


@case(
    "refusal.unspecified",
    "A selector that is UNSPECIFIED is refused with INVALID_ARGUMENT, and nothing is changed.",
)
async def unspecified(trial: Trial) -> None:
    await _all_refused(trial, selecting(trial, 0), INVALID)


@case(
    "refusal.unknown-enum",
    "A number that no enum of the schema has is refused, never read as some other value.",
)
async def unknown_enum(trial: Trial) -> None:
    wanted = (INVALID, grpc.StatusCode.UNIMPLEMENTED)
    await _all_refused(trial, selecting(trial, UNKNOWN_NUMBER), *wanted)


@case(
    "refusal.empty-selector",
    "An empty selector is refused with INVALID_ARGUMENT; leaving something out never means all.",
)
async def empty(trial: Trial) -> None:
    await _all_refused(trial, _empty(trial), INVALID)


def _not_offered(trial: Trial) -> Iterator[Any]:
    orders, profile, K = trial.orders, trial.profile, pb.AdminOperationKind  # noqa: N806
    if trial.offers(K.ADMIN_OPERATION_KIND_FLUSH_CACHES):
        for kind in _others(pb.CacheKind, profile.cache_kinds):
            yield orders.flush(caches=[kind])
    if trial.offers(K.ADMIN_OPERATION_KIND_PAUSE):
        for mode in _others(pb.PauseMode, profile.pause_modes):
            yield orders.pause(mode)
        for rule in _others(pb.NewRequests, profile.new_requests):
            yield trial.pause(new_requests=rule)
    if trial.offers(K.ADMIN_OPERATION_KIND_RELEASE_RESOURCES):
        for kind in _others(pb.ResourceKind, [one.kind for one in profile.resources]):
            yield orders.release(resources=[kind])
        for content in _others(pb.ContentPolicy, profile.resources[0].content):
            yield orders.release(content=content)
        for rule in _others(pb.DrainRule, profile.drain_rules):
            yield orders.release(drain=rule)
    if trial.offers(K.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS):
        for source in _others(pb.WeightSourceKind, profile.weight_sources):
            yield orders.load(**sources.of(source, trial.profile.world_size))
        if pb.WEIGHT_SOURCE_KIND_SESSION in profile.weight_sources:
            yield orders.load(session=sources.unknown_payload())
        for policy in _others(pb.CachePolicy, profile.cache_policies):
            yield orders.update("/nowhere", cache_policy=policy)
        for component in _others(pb.Component, profile.components):
            yield orders.update("/nowhere", components=[component])
    if trial.offers(K.ADMIN_OPERATION_KIND_PROFILE):
        for kind in _others(pb.ProfilerKind, profile.profiler_kinds):
            yield orders.start_profile(kind=kind)
    if trial.offers(K.ADMIN_OPERATION_KIND_RECONFIGURE_SERVING):
        for field in _others(pb.ReconfigurableField, profile.reconfigurable):
            name = (
                named(pb.ReconfigurableField, field).removeprefix("RECONFIGURABLE_FIELD_").lower()
            )
            yield orders.reconfigure(**{name: 1})


def _others(enum: Any, offered: Any) -> list[Any]:
    return sorted(set(enum.values()) - {0} - set(offered))


@case(
    "refusal.not-offered-value",
    "A value of the schema that the profile does not offer is UNIMPLEMENTED, and nothing is"
    " changed.",
)
async def not_offered(trial: Trial) -> None:
    requests = list(_not_offered(trial))
    if not requests:
        raise NotPromised("the profile offers every value of every selector")
    await _all_refused(trial, iter(requests), grpc.StatusCode.UNIMPLEMENTED)


@case(
    "refusal.malformed-key",
    "A mutation needs a key of 1 to 128 printable ASCII characters; any other, or none, is refused"
    " with INVALID_ARGUMENT.",
)
async def malformed_key(trial: Trial) -> None:
    for key in _KEYS:
        async with trial.unchanged(f"an order with the key {key[:20]!r}"):
            await trial.client.refused(trial.order(idempotency_key=key), INVALID)


@case("refusal.longest-key", "A key of 128 printable ASCII characters is as good as a short one.")
async def longest_key(trial: Trial) -> None:
    key = f"{trial.key()}-{'~' * 128}"[:128]
    await trial.client.completed(trial.order(idempotency_key=key))
    found = await trial.client.operation(idempotency_key=key)
    expect(found.idempotency_key == key, f"the operation of key {key}", found.idempotency_key)


@case(
    "refusal.deadline",
    "A deadline of 0, or beyond the longest that the profile states, is refused with"
    " INVALID_ARGUMENT.",
)
async def deadline(trial: Trial) -> None:
    longest = trial.profile.limits.max_deadline_ms
    for deadline_ms in (0, longest + 1) if longest else (0,):
        async with trial.unchanged(f"an order with a deadline of {deadline_ms} ms"):
            await trial.client.refused(trial.order(deadline_ms=deadline_ms), INVALID)


@case("refusal.model", "A model that discovery does not name is refused, and nothing is changed.")
async def model(trial: Trial) -> None:
    async with trial.unchanged("an order for an unknown model"):
        wanted = (INVALID, grpc.StatusCode.NOT_FOUND)
        await trial.client.refused(trial.order(model=f"no-model-{trial.prefix}"), *wanted)


@case(
    "refusal.model-required",
    "Where several models are served, an order that names neither a model nor the whole engine is"
    " refused with INVALID_ARGUMENT.",
)
async def model_required(trial: Trial) -> None:
    if len(trial.profile.models) < 2:
        raise NotPromised("the engine serves one model")
    request = trial.order()
    request.ClearField("whole_engine")
    async with trial.unchanged("an order that names no model"):
        await trial.client.refused(request, INVALID)


@case(
    "refusal.leaves-no-operation",
    "An order that is refused before acceptance leaves no operation behind, and its key is free.",
)
async def leaves_no_operation(trial: Trial) -> None:
    key = trial.key()
    stale = trial.profile.revision + 1_000_000
    await trial.client.refused(
        trial.order(idempotency_key=key, expected_revision=stale), grpc.StatusCode.ABORTED
    )
    await trial.client.refused(
        pb.GetAdminOperationRequest(idempotency_key=key), grpc.StatusCode.NOT_FOUND
    )
    await trial.client.completed(trial.order(idempotency_key=key))


@case(
    "refusal.oversized",
    "A message above the limit that the profile states is RESOURCE_EXHAUSTED, changes nothing, and"
    " the engine answers on; one within it is not.",
)
async def oversized(trial: Trial) -> None:
    limit = trial.profile.limits.max_message_bytes
    if not 4 * _FRAME < limit <= _LARGEST_TRIED:
        raise NotApplicable(f"the limit of {limit} bytes is beyond what the suite sends")
    async with trial.unchanged("messages that are too large"):
        # Whoever is alone on its connection loses nobody else's when that breaks.
        client = trial.connect()
        within = await client.told(trial.order(model="m" * (limit - _FRAME)))
        code = None if within.refusal is None else within.refusal.code
        expect(
            code not in (None, grpc.StatusCode.RESOURCE_EXHAUSTED),
            "a message within the limit to be read, and refused for its unknown model",
            code.name if code else within,
        )
        beyond = await client.told(trial.order(model="m" * (limit + 1)))
        expect(
            beyond.refusal is not None
            and beyond.refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED,
            "a message beyond the limit to be RESOURCE_EXHAUSTED",
            beyond,
        )
        trial.record.overlook()
    answer = await client.ask(pb.GetAdminProfileRequest())
    expect(not isinstance(answer, Refusal), "the same client to be answered afterwards", answer)


CASES: tuple[Case, ...] = (
    unspecified,
    empty,
    unknown_enum,
    not_offered,
    malformed_key,
    longest_key,
    deadline,
    model,
    model_required,
    leaves_no_operation,
    oversized,
)
