"""What each way to an engine offers, read off the code that says so.

A way is a package that builds `Capabilities` of its own: a sidecar, a dialect of the gateway, the
reference engine. What that function names of `OperationKind`, itself or by a constant of its
module, is what it can come to offer. A new package appears by itself.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from app.domain.kinds import OperationKind

ROOT = Path(__file__).resolve().parents[2]
APP = ROOT / "app"
# Whose capabilities are not an engine's: what is common to all, or read from what an engine says.
_NOBODY = ("domain", "enginekit", "rpc", "http", "conformance")
CORE = "core"


@dataclass(frozen=True, slots=True)
class Way:
    """`key`: by which evidence of it is found. `name`: as the page calls it."""

    key: str
    name: str
    offers: frozenset[OperationKind]


@cache
def ways() -> tuple[Way, ...]:
    found: dict[str, set[OperationKind]] = {}
    for path in sorted(APP.rglob("*.py")):
        relative = path.relative_to(APP)
        if relative.parts[0] in _NOBODY or len(relative.parts) < 2:
            continue
        kinds = _offered(ast.parse(path.read_text()))
        if kinds:
            found.setdefault(_key(relative), set()).update(kinds)
    core = (APP / "backends" / "core_control.py").read_text()
    found[CORE] = {OperationKind[name] for name in re.findall(r"ADMIN_OPERATION_KIND_(\w+)", core)}
    return tuple(Way(key, _name(key), frozenset(kinds)) for key, kinds in sorted(found.items()))


def _key(relative: Path) -> str:
    """`sidecars/vllm`, `backends/vllm`, `reference_engine`."""
    return "/".join(relative.parts[:-1][:2])


def _name(key: str) -> str:
    room, _, engine = key.partition("/")
    if engine == "native":  # is no command of its own
        return "`sidecar trtllm`, gRPC"
    if room == "sidecars":
        return f"`sidecar {engine}`"
    if room == "backends":
        return f"dialect `{engine}`"
    return "core `Control`" if key == CORE else key.replace("_", " ")


def _offered(module: ast.Module) -> set[OperationKind]:
    constants = {
        target.id: _kinds(node)
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: set[OperationKind] = set()
    for function in ast.walk(module):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and _builds(function):
            found |= _kinds(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Name):
                    found |= constants.get(node.id, set())
    return found


def _builds(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Capabilities"
        for node in ast.walk(function)
    )


def _kinds(node: ast.AST) -> set[OperationKind]:
    return {
        OperationKind[one.attr]
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.value, ast.Name)
        and one.value.id == "OperationKind"
        and one.attr in OperationKind.__members__
    }
