"""The import contracts refuse what they are there to refuse, and the tree keeps them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from grimp import ImportGraph

from tests.architecture.rooms import OutsideContract, RoomsContract, parse, room_of

ROOT = Path(__file__).resolve().parents[2]
SESSION = {"root_packages": ["app"]}
CONTRACTS = {
    contract["type"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
}
CLASSES = {"rooms": RoomsContract, "outside": OutsideContract}


def kept(kind: str, importer: str, imported: str) -> bool:
    """Whether the project's contract of this kind allows one import, by itself."""
    graph = ImportGraph()
    for module in {importer, imported}:
        graph.add_module(module, is_squashed=not module.startswith("app"))
    graph.add_import(importer=importer, imported=imported, line_number=1, line_contents="import")
    options = {k: v for k, v in CONTRACTS[kind].items() if k not in ("type", "name")}
    contract = CLASSES[kind](name=kind, session_options=SESSION, contract_options=options)
    return contract.check(graph, verbose=False).kept


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("app.domain.operation", "app.ledger.tables"),
        ("app.domain.operation", "app.clock"),
        ("app.ledger.tables", "app.operations.submit"),
        ("app.operations.submit", "app.http.problems"),
        ("app.http.engines", "app.main"),
        ("app.demo.running", "app.reference_engine.supervisor"),
        ("app.auth.tokens.verifier", "app.auth.requires"),
        ("app.auth.tokens.verifier", "app.ledger.tables"),
        ("app.auth.policy", "app.ledger.tables"),
        ("app.enginekit.servicer", "app.reference_engine.runtime"),
        ("app.enginekit.servicer", "app.auth.requires"),
        ("app.http.engines", "app.rpc.openengine.v1.admin_pb2"),
        ("app.operations.run", "app.rpc.openengine.v1.admin_pb2"),
        ("app.main", "app.reference_engine.supervisor"),
        ("app.main", "app.devidp.issuer"),
        ("app.http.engines", "app.sidecars.vllm"),
        ("app.http.engines", "app.conformance.suite"),
        ("app.brand_new", "app.domain.operation"),
    ],
)
def test_import_into_another_room_is_refused(importer: str, imported: str) -> None:
    assert not kept("rooms", importer, imported)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("app.ledger.tables", "app.domain.operation"),
        ("app.ledger.tables", "app.ledger.session"),
        ("app.ledger.tables", "app.clock"),
        ("app.operations.run", "app.backends.port"),
        ("app.auth.sessions", "app.ledger.session"),
        ("app.enginekit.interceptor", "app.auth.tokens.verifier"),
        ("app.commands.serving", "app.reference_engine.supervisor"),
        ("app.inference_client", "app.rpc.openengine.v1.openengine_pb2_grpc"),
        ("app.http.middleware", "app"),
    ],
)
def test_import_of_a_room_below_is_allowed(importer: str, imported: str) -> None:
    assert kept("rooms", importer, imported)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("app.domain.operation", "pydantic", False),
        ("app.domain.operation", "a_package_nobody_listed", False),
        ("app.domain.operation", "dataclasses", True),
        ("app.enginekit.admission", "torch", False),
        ("app.reference_engine.model", "torch", True),
        ("app.operations.run", "grpc", False),
        ("app.operations.run", "fastapi", False),
        ("app.auth.tokens.jwks", "fastapi", False),
        ("app.auth.tokens.jwks", "sqlalchemy", False),
        ("app.backends.channels", "grpc", True),
        ("app.http.engines", "sqlalchemy", False),
        ("app.ledger.tables", "sqlalchemy", True),
    ],
)
def test_package_from_outside(importer: str, imported: str, allowed: bool) -> None:
    assert kept("outside", importer, imported) is allowed


def test_the_longest_row_decides() -> None:
    assert room_of("app.auth.tokens.jwks", ["app.auth", "app.auth.tokens"]) == "app.auth.tokens"
    assert room_of("app.authority", ["app.auth"]) is None


@pytest.mark.parametrize(
    "rows", [["app.domain app.rpc"], ["app.a: app.b", "app.a: app.c"], [": x"]]
)
def test_a_malformed_table_is_an_error(rows: list[str]) -> None:
    with pytest.raises(ValueError, match="not a row"):
        parse(rows)


def test_the_tree_keeps_its_contracts() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
