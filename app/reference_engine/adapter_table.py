"""Which adapters requests may name, as the front end sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from app.reference_engine.adapter_orders import LoadedAdapter
from app.reference_engine.errors import UnknownAdapter


class AdapterTable:
    """``loaded`` is what the ranks hold, ``users`` how many open requests name an adapter.

    Every request passes here, on one event loop: between looking at the users and closing an
    adapter to new ones there is no gap for a request to slip through.
    """

    def __init__(
        self, loaded: Callable[[], tuple[LoadedAdapter, ...]], users: Callable[[str], int]
    ) -> None:
        self._loaded = loaded
        self.users = users
        self._closed: set[str] = set()
        self._last_use: dict[str, int] = {}
        self._uses = 0
        self._last_number = 0

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        return self._loaded()

    def find(self, name: str) -> LoadedAdapter | None:
        return next((one for one in self.loaded if one.name == name), None)

    def admit(self, name: str) -> None:
        """A request is about to use it. Raises UnknownAdapter."""
        if name in self._closed or self.find(name) is None:
            raise UnknownAdapter
        self.used(name)

    def used(self, name: str) -> None:
        self._uses += 1
        self._last_use[name] = self._uses

    def close(self, names: Iterable[str]) -> None:
        """From now on no request is let in that names one of them."""
        self._closed.update(names)

    def reopen(self, names: Iterable[str]) -> None:
        """They stay, or are gone: only what is loaded can be named."""
        self._closed.difference_update(names)
        there = {one.name for one in self.loaded}
        self._last_use = {name: at for name, at in self._last_use.items() if name in there}

    def idle_longest(self, count: int) -> tuple[str, ...] | None:
        """So many that no request uses, first those whose latest request came first; None: there
        are not so many."""
        idle = [one.name for one in self.loaded if not self.users(one.name)]
        idle.sort(key=lambda name: self._last_use.get(name, 0))
        return tuple(idle[:count]) if len(idle) >= count else None

    def new_number(self) -> int:
        """One that no adapter of this engine has had, as far as it chose them itself."""
        self._last_number = max([self._last_number, *(one.number for one in self.loaded)]) + 1
        return self._last_number
