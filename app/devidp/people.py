"""The people of the demonstration. Whoever has the run's code may be any of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from app.devidp.clients import IDENTITY_SCOPES
from app.domain.scopes import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """``group`` is what a policy may know them by; ``does`` is one line for the page."""

    subject: str
    name: str
    group: str
    does: str
    scopes: frozenset[Scope]

    def granted(self, scope: str) -> str:
        """What of a client's scope this person may give it, in its order."""
        return " ".join(
            name for name in scope.split() if name in IDENTITY_SCOPES or name in self.scopes
        )


def narrowed_to_nothing(asked: str, granted: str) -> bool:
    """Whether something was asked for at the audience and none of it is left."""
    return bool(_beyond_identity(asked)) and not _beyond_identity(granted)


def audience_scopes(scope: str) -> list[str]:
    """Those that mean something at the audience, sorted: an access token has no others."""
    return sorted(_beyond_identity(scope))


def _beyond_identity(scope: str) -> set[str]:
    return set(scope.split()) - IDENTITY_SCOPES


def demo_people() -> tuple[Person, ...]:
    """From the one who may do least to the one who may do most."""
    operating = {
        Scope.READ,
        Scope.PAUSE,
        Scope.CACHE,
        Scope.RESOURCES,
        Scope.ABORT,
        Scope.CANCEL,
        Scope.PROFILE,
    }
    training = {
        Scope.READ,
        Scope.PAUSE,
        Scope.CACHE,
        Scope.RESOURCES,
        Scope.WEIGHTS,
        Scope.ADAPTERS,
        Scope.CANCEL,
    }
    return (
        _person("vera", "Vera", "viewers", "Looks, and changes nothing.", {Scope.READ}),
        _person("otto", "Otto", "operators", "Keeps engines running.", operating),
        _person("tara", "Tara", "trainers", "Brings new weights.", training),
        _person(
            "ada",
            "Ada",
            "admins",
            "May give every order except to take pickled weights.",
            set(Scope) - {Scope.WEIGHTS_UNSAFE},
        ),
    )


def _person(subject: str, name: str, group: str, does: str, scopes: Iterable[Scope]) -> Person:
    return Person(subject=subject, name=name, group=group, does=does, scopes=frozenset(scopes))
