"""What the engine offers, and its state, as GetAdminProfile tells it."""

from __future__ import annotations

from dataclasses import replace

from app.domain.capabilities import Capabilities, Limits
from app.domain.facts import EngineFacts
from app.domain.kinds import (
    DrainRule,
    NewRequests,
    OperationKind,
    PauseMode,
    ProfilerKind,
    ProfileState,
    RevisionSource,
    WeightSourceKind,
    WeightTransferBackend,
)
from app.enginekit.carrying_out import CARRYING_OUT
from app.enginekit.records import Record
from app.enginekit.runtime import ProfilerRuntime, Runtime, WeightSessionRuntime
from app.enginekit.settings import KitSettings
from app.enginekit.state import EngineState
from app.enginekit.vocabulary import (
    ADMISSION_STATE,
    CACHE_KIND,
    CONTENT_POLICY,
    ENGINE_ROLE,
    NEW_REQUESTS,
    OPERATION_KIND,
    OPERATION_STATE,
    PAUSE_MODE,
    PROFILE_STATE,
    PROFILER_KIND,
    RESOURCE_KIND,
    REVISION_SOURCE,
    WEIGHTS_STATE,
    numbers_of_names,
)
from app.enginekit.wire import nanos, rank_message
from app.rpc.openengine.v1 import admin_pb2, lora_pb2

# Beside the orders: ending requests is the core Control service's.
_SERVED = frozenset(CARRYING_OUT) | {OperationKind.ABORT_REQUESTS, OperationKind.PROFILE}
_DRAINING = frozenset({OperationKind.RELEASE_RESOURCES, OperationKind.RECONFIGURE_SERVING})
_MEMORY = frozenset({OperationKind.RELEASE_RESOURCES, OperationKind.RESTORE_RESOURCES})
_REST_ON_PAUSES = _DRAINING | {OperationKind.RESTORE_RESOURCES, OperationKind.UPDATE_WEIGHTS}


def capabilities_of(runtime: Runtime, settings: KitSettings) -> Capabilities:
    """What the runtime can do, as far as the kit can carry it out, with the kit's own part."""
    offered = runtime.capabilities()
    operations = offered.operations & _SERVED
    pauses = OperationKind.PAUSE in operations
    if not isinstance(runtime, ProfilerRuntime):
        operations -= {OperationKind.PROFILE}
    # Whose engine closes by itself for a release needs no pause of its own to be ordered.
    closes = not pauses and bool(offered.drain_rules)
    if not pauses:
        operations -= _REST_ON_PAUSES - (_MEMORY if closes else frozenset())
    modes = offered.pause_modes if pauses else frozenset()
    sessions = _sessions(runtime, offered, operations)
    sources = offered.weight_sources - {WeightSourceKind.SESSION}
    if sessions:
        sources |= {WeightSourceKind.SESSION}
    drains = _drain_rules(modes) if operations & _DRAINING else frozenset()
    if closes and operations & _MEMORY:
        drains = frozenset({DrainRule.WAIT})
    arriving = offered.new_requests or frozenset(NewRequests)
    # The drain is the kit's own, and so is the power to break it off.
    cancellable = (offered.cancellable | {OperationKind.PAUSE}) & operations
    return replace(
        offered,
        operations=operations,
        cancellable=cancellable - {OperationKind.ABORT_REQUESTS},
        new_requests=arriving if pauses else frozenset(),
        drain_rules=drains & (offered.drain_rules or drains),
        weight_sources=sources,
        weight_sessions=sessions,
        payload_formats=(
            offered.payload_formats
            if WeightTransferBackend.ENGINE_PAYLOAD in sessions
            else frozenset()
        ),
        models=runtime.describe().models,
        world_size=len(runtime.ranks),
        limits=Limits(
            max_message_bytes=settings.max_message_bytes,
            operations_kept=settings.operations_kept,
            key_retention_ms=settings.key_retention_ms,
            default_deadline_ms=settings.default_deadline_ms,
            max_deadline_ms=settings.max_deadline_ms,
            default_hold_limit_ms=settings.default_hold_limit_ms,
            max_hold_limit_ms=settings.max_hold_limit_ms,
            max_held_requests=settings.max_held_requests,
        ),
    )


def _sessions(
    runtime: Runtime, offered: Capabilities, operations: frozenset[OperationKind]
) -> frozenset[str]:
    takes_pieces = isinstance(runtime, WeightSessionRuntime)
    if OperationKind.UPDATE_WEIGHTS not in operations or not takes_pieces:
        return frozenset()
    return offered.weight_sessions & frozenset(WeightTransferBackend)


def _drain_rules(modes: frozenset[PauseMode]) -> frozenset[str]:
    """A drain is a pause that the order makes for itself."""
    rules: set[str] = set()
    if PauseMode.DRAIN in modes:
        rules |= {DrainRule.WAIT, DrainRule.REFUSE}
    if PauseMode.ABORT in modes:
        rules.add(DrainRule.ABORT)
    return frozenset(rules)


def profile_message(can: Capabilities, state: EngineState) -> admin_pb2.AdminProfile:
    facts = state.facts()
    limits = can.limits
    return admin_pb2.AdminProfile(
        operations=[
            admin_pb2.OperationSupport(
                kind=OPERATION_KIND.number(kind), cancellable=kind in can.cancellable
            )
            for kind in sorted(can.operations, key=OPERATION_KIND.number)
        ],
        cache_kinds=CACHE_KIND.numbers(can.cache_kinds),
        resources=[
            admin_pb2.ResourceSupport(
                kind=RESOURCE_KIND.number(kind), content=CONTENT_POLICY.numbers(policies)
            )
            for kind, policies in sorted(
                can.resources.items(), key=lambda row: RESOURCE_KIND.number(row[0])
            )
        ],
        pause_modes=PAUSE_MODE.numbers(can.pause_modes),
        new_requests=NEW_REQUESTS.numbers(can.new_requests),
        drain_rules=numbers_of_names(admin_pb2.DrainRule, "DRAIN_RULE", can.drain_rules),
        weight_sources=numbers_of_names(
            admin_pb2.WeightSourceKind, "WEIGHT_SOURCE_KIND", can.weight_sources
        ),
        weight_sessions=numbers_of_names(
            admin_pb2.WeightTransferBackend, "WEIGHT_TRANSFER_BACKEND", can.weight_sessions
        ),
        payload_formats=sorted(can.payload_formats),
        cache_policies=numbers_of_names(admin_pb2.CachePolicy, "CACHE_POLICY", can.cache_policies),
        components=numbers_of_names(admin_pb2.Component, "COMPONENT", can.components),
        profiler_kinds=numbers_of_names(
            admin_pb2.ProfilerKind, "PROFILER_KIND", can.profiler_kinds
        ),
        reconfigurable=numbers_of_names(
            admin_pb2.ReconfigurableField, "RECONFIGURABLE_FIELD", can.reconfigurable
        ),
        models=can.models,
        limits=admin_pb2.AdminLimits(
            max_message_bytes=limits.max_message_bytes,
            operations_kept=limits.operations_kept,
            key_retention_ms=limits.key_retention_ms,
            default_deadline_ms=limits.default_deadline_ms,
            max_deadline_ms=limits.max_deadline_ms,
            default_hold_limit_ms=limits.default_hold_limit_ms,
            max_hold_limit_ms=limits.max_hold_limit_ms,
            max_held_requests=limits.max_held_requests,
        ),
        world_size=can.world_size,
        instance_id=facts.instance_id,
        revision=facts.revision,
        revision_source=REVISION_SOURCE.number(RevisionSource.ENGINE),
        pause_epoch=facts.pause_epoch,
        release_epoch=facts.release_epoch,
        state=_state_message(facts, state),
    )


def _state_message(facts: EngineFacts, state: EngineState) -> admin_pb2.AdminState:
    weights = facts.weights
    message = admin_pb2.AdminState(
        admission=ADMISSION_STATE.number(facts.admission),
        released=RESOURCE_KIND.numbers(facts.released),
        weights=admin_pb2.WeightsStatus(
            version=weights.version or "",
            state=WEIGHTS_STATE.number(weights.state),
            updates_since_flush=weights.updates_since_flush,
        ),
        role=ENGINE_ROLE.number(facts.role),
        loras=[
            lora_pb2.LoraAdapter(lora_id=lora.id, lora_name=lora.name, source_path=lora.path)
            for lora in facts.loras
        ],
        open_operations=[_open_message(r) for r in state.journal.open_operations()],
        ranks=[rank_message(report) for report in state.ranks],
    )
    pause = state.shown_pause()
    if pause is not None:
        message.pause.CopyFrom(
            admin_pb2.PauseStatus(
                mode=PAUSE_MODE.number(pause.mode),
                epoch=pause.epoch,
                operation_id=pause.operation_id,
                idempotency_key=pause.idempotency_key,
                since_unix_nanos=nanos(pause.since),
                new_requests=NEW_REQUESTS.number(pause.rule.new_requests),
                hold_limit_ms=pause.rule.hold_limit_ms,
                requests_kept=state.frozen,
                requests_held=state.gate.held,
            )
        )
    profile = state.profile
    if profile is not None:
        message.profile.CopyFrom(
            admin_pb2.ProfileStatus(
                profile_id=profile.id,
                kind=PROFILER_KIND.number(ProfilerKind(profile.kind)),
                state=PROFILE_STATE.number(ProfileState(profile.state)),
            )
        )
    return message


def _open_message(record: Record) -> admin_pb2.OpenOperation:
    op = record.operation
    return admin_pb2.OpenOperation(
        operation_id=op.id,
        idempotency_key=record.key,
        kind=OPERATION_KIND.number(op.kind),
        state=OPERATION_STATE.number(op.state),
    )
