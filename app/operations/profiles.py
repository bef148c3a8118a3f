"""Profiles of an engine: the operations that record them, stopping one, and its files.

A profile is known by the id of its operation here, and by what the engine calls it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from app.backends.port import EngineRefused, EngineSilent
from app.clock import Clock
from app.domain.errors import (
    ChadburnError,
    EngineFault,
    ProfileNotReady,
    ProfileNotRecording,
    ProfilingRefused,
    UnknownArtifact,
    UnknownProfile,
    UnsupportedOperation,
)
from app.domain.kinds import OperationKind
from app.domain.operation import JsonValue, Operation
from app.ledger.ledger import Ledger
from app.ledger.values import OperationFilter, Page
from app.operations.artifacts import Artifact, Artifacts, OpenFile
from app.operations.auditing import entry_of, refusals_audited
from app.operations.callers import Caller
from app.operations.fleet import Fleet
from app.operations.lookout import failure_of

_STOP_TIMEOUT_S = 5.0
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_KINDS = frozenset({OperationKind.PROFILE})


class Profiles:
    def __init__(self, ledger: Ledger, fleet: Fleet, clock: Clock, artifacts: Artifacts) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._clock = clock
        self._artifacts = artifacts

    async def find(self, engine_id: str, profile: str) -> Operation:
        """Raises UnknownProfile."""
        if not _ID.fullmatch(profile):  # cannot be one, and not every database takes any text
            raise UnknownProfile("there is no such profile of this engine")
        operation = await self._ledger.operations.get(profile)
        if operation is None:
            operation = await self._called(engine_id, profile)
        if (
            operation is None
            or operation.engine_id != engine_id
            or operation.kind is not OperationKind.PROFILE
        ):
            raise UnknownProfile("there is no such profile of this engine")
        return operation

    async def _called(self, engine_id: str, profile_id: str) -> Operation | None:
        """The operation of what the engine calls so."""
        wanted = OperationFilter(engine_id=engine_id, kinds=_KINDS, engine_operation_id=profile_id)
        page = await self._ledger.operations.page(wanted, size=1)
        return page.items[0] if page.items else None

    async def _recording(self, operation: Operation) -> Operation:
        """The one that records: this, or the one that was running when this one was ordered."""
        result = operation.result or {}
        if result.get("changed") is not False:
            return operation
        known = await self._called(operation.engine_id, str(result.get("profile_id")))
        return known or operation

    async def page(self, engine_id: str, before: int | None, size: int) -> Page[Operation]:
        """Newest first."""
        wanted = OperationFilter(engine_id=engine_id, kinds=_KINDS)
        return await self._ledger.operations.page(wanted, before, size)

    def downloadable(self, engine_id: str) -> bool:
        return self._artifacts.reachable(engine_id)

    async def stop(self, operation: Operation, caller: Caller) -> Operation:
        """Record no more, and have the files written. One that has ended stays as it is. Gives the
        operation that records, which need not be the one that was named.

        Raises ProfileNotRecording (the engine has not taken it on yet: cancel it, or ask again),
        ProfilingRefused, UnknownProfile (the engine does not know it any more),
        EngineUnreachable, EngineFault.
        """
        async with refusals_audited(
            self._ledger,
            self._clock,
            "stop_profile",
            caller,
            engine_id=operation.engine_id,
            operation_id=operation.id,
        ):
            operation = await self._recording(operation)
            if operation.done:
                return operation
            if operation.engine_operation_id is None:
                raise ProfileNotRecording(
                    "the engine has not taken it on yet", operation_id=operation.id, retry_after_s=1
                )
            backend = await self._fleet.backend(operation.engine_id)
            try:
                await backend.stop_profile(
                    operation.engine_operation_id, f"{operation.id}.stop", _STOP_TIMEOUT_S
                )
            except EngineRefused as refused:
                raise _refusal(refused, operation) from refused
            except EngineSilent as silent:
                raise failure_of(silent) from silent
        await self._ledger.audit.append(
            entry_of(
                self._clock.now(),
                "stop_profile",
                "accepted",
                caller,
                engine_id=operation.engine_id,
                operation_id=operation.id,
            )
        )
        return await self._ledger.operations.get(operation.id) or operation

    async def artifact(
        self, operation: Operation, rank: int | None, caller: Caller
    ) -> tuple[Artifact, OpenFile]:
        """One file, open and checked; the audit says who got it. `rank` None: there is one alone.

        Raises ProfileNotReady, UnknownArtifact, ArtifactDamaged, ArtifactsNotReachable.
        """
        engine_id = operation.engine_id
        async with refusals_audited(
            self._ledger,
            self._clock,
            "download_artifact",
            caller,
            engine_id=engine_id,
            operation_id=operation.id,
        ):
            operation = await self._recording(operation)
            artifact = _chosen(artifacts_of(operation), rank)
            file = await self._artifacts.open(engine_id, artifact)
        try:
            await self._ledger.audit.append(
                entry_of(
                    self._clock.now(),
                    "download_artifact",
                    "allowed",
                    caller,
                    engine_id=engine_id,
                    operation_id=operation.id,
                    detail={"rank": artifact.rank, "sha256": artifact.sha256},
                )
            )
        except BaseException:
            # What can't be written down isn't handed out.
            file.close()
            raise
        return artifact, file


def artifacts_of(operation: Operation) -> tuple[Artifact, ...]:
    """Of a profile that has succeeded; none before, and none of one that was found running."""
    found = (operation.result or {}).get("artifacts", [])
    return tuple(_artifact(one) for one in cast("list[Mapping[str, JsonValue]]", found))


def _artifact(one: Mapping[str, JsonValue]) -> Artifact:
    return Artifact(
        rank=cast("int", one["rank"]),
        path=str(one["path"]),
        size_bytes=cast("int", one["size_bytes"]),
        sha256=str(one["sha256"]),
        media_type=str(one["media_type"]),
    )


def _chosen(artifacts: tuple[Artifact, ...], rank: int | None) -> Artifact:
    if not artifacts:
        raise ProfileNotReady("this profile has no files")
    wanted = [one for one in artifacts if rank is None or one.rank == rank]
    if len(wanted) != 1:
        ranks = ", ".join(str(one.rank) for one in artifacts)
        raise UnknownArtifact(f"say of which rank: {ranks}")
    return wanted[0]


def _refusal(refused: EngineRefused, operation: Operation) -> ChadburnError:
    match refused.error.code:
        case "NOT_FOUND":
            return UnknownProfile("the engine does not know it any more")
        case "FAILED_PRECONDITION":
            return ProfilingRefused(
                "the engine does not stop it now", operation_id=operation.id, retry_after_s=1
            )
        case "UNIMPLEMENTED":
            return UnsupportedOperation("this engine does not stop profiles")
    return EngineFault("the engine refused to stop it")
