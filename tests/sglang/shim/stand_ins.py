"""Placeholders for compiled packages that have no build for a CPU: they are there to be imported,
and raise when they are called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Placeholder:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise RuntimeError(f"{self._name} is a placeholder: nothing on a CPU should have called it")

    def __repr__(self) -> str:
        return f"<placeholder of {self._name}>"

    def __mro_entries__(self, _: tuple[type, ...]) -> tuple[type, ...]:
        return (object,)


def names_of(module: str) -> Callable[[str], Placeholder]:
    """A module's `__getattr__`."""

    def found(name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{module}.{name}")

    return found


class Submodules(MetaPathFinder, Loader):
    """Every module below `package`, with `real` names in each of them."""

    def __init__(self, package: str, real: Mapping[str, Any]) -> None:
        self._prefix = package + "."
        self._real = real

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = names_of(spec.name)  # type: ignore[method-assign]
        for name, each in self._real.items():
            setattr(module, name, each)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def stand_in(package: str, **real: Any) -> None:
    sys.meta_path.append(Submodules(package, real))
