"""Giving memory back, and taking it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from app.domain.capabilities import Capabilities
from app.domain.command import Command, fault, frozen_requests, refuse_frozen
from app.domain.errors import RequestsInFlight, StaleReleaseEpoch
from app.domain.facts import EngineFacts
from app.domain.kinds import ContentPolicy, DrainRule, OperationKind, ResourceKind
from app.domain.operation import JsonObject, JsonValue


def _check_resources(resources: tuple[ResourceKind, ...]) -> None:
    if not resources:
        raise fault("/resources", "name at least one resource")
    if len(set(resources)) != len(resources):
        raise fault("/resources", "name each resource once")


def _named(resources: tuple[ResourceKind, ...]) -> list[JsonValue]:
    return [resource.value for resource in resources]


def _resources(document: JsonObject) -> tuple[ResourceKind, ...]:
    return tuple(ResourceKind(name) for name in cast("list[str]", document["resources"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseResources(Command):
    """Closes admission. `drain` is for requests that run; what a pause has frozen stays frozen
    under WAIT, as long as its content is preserved."""

    kind = OperationKind.RELEASE_RESOURCES
    resources: tuple[ResourceKind, ...]
    content: ContentPolicy
    drain: DrainRule

    def __post_init__(self) -> None:
        _check_resources(self.resources)

    def document(self) -> JsonObject:
        return {
            **Command.document(self),
            "resources": _named(self.resources),
            "content": self.content.value,
            "drain": self.drain.value,
        }

    @classmethod
    def of(cls, document: JsonObject) -> ReleaseResources:
        return cls(
            model=cast("str | None", document.get("model")),
            resources=_resources(document),
            content=ContentPolicy(cast("str", document["content"])),
            drain=DrainRule(cast("str", document["drain"])),
        )

    def check_supported(self, can: Capabilities) -> None:
        Command.check_supported(self, can)
        for resource in self.resources:
            offered = can.resources.get(resource, frozenset())
            self._require(f"{resource.value} {self.content.value}", self.content in offered)
        self._require(f"drain {self.drain.value}", self.drain in can.drain_rules)
        whole = not can.resources_together or set(self.resources) == set(can.resources)
        self._require("one of its resources alone", whole)

    def check_state(self, facts: EngineFacts) -> None:
        if self.content is ContentPolicy.DISCARD:
            refuse_frozen(facts)
        if self.drain is DrainRule.REFUSE and frozen_requests(facts):
            raise RequestsInFlight("requests are frozen by a pause")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResources(Command):
    """All or part of what is released. Never opens admission."""

    kind = OperationKind.RESTORE_RESOURCES
    resources: tuple[ResourceKind, ...]
    release_epoch: int

    def __post_init__(self) -> None:
        _check_resources(self.resources)
        if self.release_epoch <= 0:
            raise fault("/release_epoch", "name the epoch of the latest release; they start at 1")

    def document(self) -> JsonObject:
        return {
            **Command.document(self),
            "resources": _named(self.resources),
            "release_epoch": self.release_epoch,
        }

    @classmethod
    def of(cls, document: JsonObject) -> RestoreResources:
        return cls(
            model=cast("str | None", document.get("model")),
            resources=_resources(document),
            release_epoch=cast("int", document["release_epoch"]),
        )

    def check_supported(self, can: Capabilities) -> None:
        Command.check_supported(self, can)
        for resource in self.resources:
            self._require(resource.value, resource in can.resources)

    def check_state(self, facts: EngineFacts) -> None:
        if self.release_epoch != facts.release_epoch:
            raise StaleReleaseEpoch(given=self.release_epoch, current=facts.release_epoch)
