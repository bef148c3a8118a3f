"""Which orders a test gives and demands success of, read off its source.

    client.completed(client.pause("abort"))           the kit's client
    client.control.LoadLora(...)                      outside of `refused`
    clients.release(...).completed()                  that of the reference engine
    bridge.does(ENGINE, "release-resources", {...})   through a gateway
    ended = await gateway.carry_out(ReleaseResources(...)); assert ended.state is S.SUCCEEDED

Whatever a test calls, of its own module or of another one of the tests that it imports from, counts
as its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from app.domain.kinds import OperationKind as Kind
from tests.engines.offers import ROOT

_METHODS = {
    "pause": Kind.PAUSE, "resume": Kind.RESUME, "flush": Kind.FLUSH_CACHES,
    "release": Kind.RELEASE_RESOURCES, "restore": Kind.RESTORE_RESOURCES,
    "update": Kind.UPDATE_WEIGHTS, "reconfigure": Kind.RECONFIGURE_SERVING,
}  # fmt: skip
_RPCS = {
    "LoadLora": Kind.LOAD_LORA, "UnloadLora": Kind.UNLOAD_LORA, "Abort": Kind.ABORT_REQUESTS,
}  # fmt: skip
_VERBS = {
    "pause": Kind.PAUSE, "resume": Kind.RESUME, "flush-caches": Kind.FLUSH_CACHES,
    "release-resources": Kind.RELEASE_RESOURCES, "restore-resources": Kind.RESTORE_RESOURCES,
    "update-weights": Kind.UPDATE_WEIGHTS, "weight-version": Kind.SET_WEIGHT_VERSION,
    "profiles": Kind.PROFILE, "reconfigure": Kind.RECONFIGURE_SERVING, "loras": Kind.LOAD_LORA,
    "abort-requests": Kind.ABORT_REQUESTS, "shutdown": Kind.SHUTDOWN,
}  # fmt: skip
_COMMANDS = {
    "Pause": Kind.PAUSE, "Resume": Kind.RESUME, "FlushCaches": Kind.FLUSH_CACHES,
    "ReleaseResources": Kind.RELEASE_RESOURCES, "RestoreResources": Kind.RESTORE_RESOURCES,
    "UpdateWeights": Kind.UPDATE_WEIGHTS, "SetWeightVersion": Kind.SET_WEIGHT_VERSION,
    "ReconfigureServing": Kind.RECONFIGURE_SERVING, "LoadLora": Kind.LOAD_LORA,
    "UnloadLora": Kind.UNLOAD_LORA, "AbortRequests": Kind.ABORT_REQUESTS, "Shutdown": Kind.SHUTDOWN,
}  # fmt: skip
# What is inside of these is demanded to fail.
_FAILING = ("refused", "failed", "raises")


@dataclass(frozen=True, slots=True)
class Test:
    file: str
    name: str
    kinds: frozenset[Kind]

    @property
    def id(self) -> str:
        return f"{self.file}::{self.name}"


@cache
def tests_of(path: Path) -> tuple[Test, ...]:
    """Those of one file that give an order; of its classes also those that they inherit from a
    class of another one."""
    found = []
    sources = [path, *(source for source, _ in _module(path).inherited)]
    for source in dict.fromkeys(sources):
        for name in _module(source).functions:
            kinds = _all_of(source, name) if name.startswith("test_") else frozenset()
            if kinds:
                found.append(Test(str(path.relative_to(ROOT)), name, kinds))
    return tuple(found)


def tests_in(folder: Path, *, below: bool) -> Iterator[Test]:
    """`below`: those in folders of it too."""
    for path in sorted(folder.rglob("test_*.py") if below else folder.glob("test_*.py")):
        yield from tests_of(path)


@dataclass(frozen=True, slots=True)
class _Module:
    """`functions`: those of classes too. `imported`: name here, and the file and name that it has
    there. `inherited`: of those, from what the classes of tests here inherit."""

    functions: dict[str, ast.AST]
    constants: dict[str, ast.expr]
    imported: dict[str, tuple[Path, str]]
    inherited: tuple[tuple[Path, str], ...]


@cache
def _module(path: Path) -> _Module:
    functions: dict[str, ast.AST] = {}
    imported: dict[str, tuple[Path, str]] = {}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.setdefault(node.name, node)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            source = ROOT / Path(*(node.module or "").split(".")).with_suffix(".py")
            if source.is_file():
                for one in node.names:
                    imported[one.asname or one.name] = (source, one.name)
    bases = [
        base.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
        for base in node.bases
        if isinstance(base, ast.Name)
    ]
    inherited = tuple(imported[base] for base in bases if base in imported)
    return _Module(functions, _made(tree.body), imported, inherited)


def _all_of(path: Path, name: str) -> frozenset[Kind]:
    """Over everything that it reaches."""
    found: set[Kind] = set()
    seen: set[tuple[Path, str]] = set()
    waiting = [(path, name)]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            kinds, called = _own(*one)
            found |= kinds
            waiting += called
    return frozenset(found)


@cache
def _own(path: Path, name: str) -> tuple[frozenset[Kind], tuple[tuple[Path, str], ...]]:
    """What one function orders by itself, and what it calls."""
    module = _module(path)
    function = module.functions.get(name)
    if function is None:
        return frozenset(), ()
    called: set[tuple[Path, str]] = set()
    for call in _succeeding(function):
        other = _called_name(call)
        if isinstance(call.func, ast.Name):
            called.add(module.imported.get(other, (path, other)))
        else:  # a method, of a class that may have come from there
            sources = {path, *(source for source, _ in module.imported.values())}
            called |= {(source, other) for source in sources}
    return frozenset(ordered(function, module)), tuple(called)


def ordered(function: ast.AST, module: _Module | None = None) -> Iterator[Kind]:
    """By itself, without what it calls."""
    constants = {} if module is None else module.constants
    made = {**constants, **_made(list(ast.walk(function)))}
    if any(_ends_a_profile(node) for node in ast.walk(function)):
        yield Kind.PROFILE
    for call in _succeeding(function):
        name = _called_name(call)
        if name in _RPCS and _on_control(call):
            yield _RPCS[name]
        elif name == "completed":
            sources = [
                *call.args,
                *([call.func.value] if isinstance(call.func, ast.Attribute) else ()),
            ]
            for source in sources:
                for one in _calls(source, made):
                    yield from _kinds(_METHODS | _COMMANDS, _called_name(one))
        elif name == "does":
            yield from _verbs(call)
        elif name == "carry_out" and isinstance(call.func, ast.Name):  # it raises
            for argument in call.args:
                for command in _calls(argument, made):
                    yield from _commands(command, module)
    for claim in ast.walk(function):
        if isinstance(claim, ast.Assert) and _says_succeeded(claim):
            for call in _calls(claim, made):
                if _called_name(call) in ("accepted", "order"):
                    yield from _verbs(call)
                yield from _commands(call, module)


def _made(body: list[ast.AST] | list[ast.stmt]) -> dict[str, ast.expr]:
    return {
        target.id: node.value
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _ends_a_profile(node: ast.AST) -> bool:
    """`….completed.profile`"""
    inner = node.value if isinstance(node, ast.Attribute) and node.attr == "profile" else None
    return isinstance(inner, ast.Attribute) and inner.attr == "completed"


def _kinds(table: dict[str, Kind], name: str) -> Iterator[Kind]:
    if name in table:
        yield table[name]


def _verbs(call: ast.Call) -> Iterator[Kind]:
    for argument in call.args[:2]:
        if isinstance(argument, ast.Constant) and argument.value in _VERBS:
            yield _VERBS[argument.value]


def _commands(call: ast.Call, module: _Module | None) -> Iterator[Kind]:
    """One that is made here, or by a function of the module that does nothing else."""
    name = _called_name(call)
    yield from _kinds(_COMMANDS, name)
    maker = None if module is None else module.functions.get(name)
    if isinstance(maker, ast.FunctionDef):
        for made in ast.walk(maker):
            if isinstance(made, ast.Call):
                yield from _kinds(_COMMANDS, _called_name(made))


def _calls(node: ast.AST, made: dict[str, ast.expr]) -> Iterator[ast.Call]:
    """In it, and in what its names were made of."""
    seen: set[str] = set()
    waiting: list[ast.AST] = [node]
    while waiting:
        for one in ast.walk(waiting.pop()):
            if isinstance(one, ast.Call):
                yield one
            elif isinstance(one, ast.Name) and one.id in made and one.id not in seen:
                seen.add(one.id)
                waiting.append(made[one.id])


def _says_succeeded(claim: ast.Assert) -> bool:
    return any(
        (isinstance(one, ast.Constant) and one.value == "succeeded")
        or (isinstance(one, ast.Attribute) and one.attr == "SUCCEEDED")
        for one in ast.walk(claim.test)
    )


def _on_control(call: ast.Call) -> bool:
    """A stub's, and not a message of that name."""
    function = call.func
    return isinstance(function, ast.Attribute) and "control" in ast.unparse(function.value)


def _succeeding(node: ast.AST) -> Iterator[ast.Call]:
    """Calls that nothing around them demands to fail."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            if _called_name(child) in _FAILING:
                continue
            yield child
        yield from _succeeding(child)


def _called_name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
