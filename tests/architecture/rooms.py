"""Contracts for import-linter: which room may import which, and what from outside.

The contracts import-linter brings can't name a module that does not exist yet, and have no
notion of "the standard library alone". These two read a table with one row per room instead,
and a room that is not built yet is simply a row without modules.

A row is ``"importer: imported imported …"``. The longest matching name decides which room a
module belongs to, so `app.auth.tokens` is a room of its own inside `app.auth`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

Link = tuple[str, str]


def parse(rows: Iterable[str]) -> dict[str, frozenset[str]]:
    """``["a: b c"]`` to ``{"a": {"b", "c"}}``; ValueError for a row without a colon or twice."""
    table: dict[str, frozenset[str]] = {}
    for row in rows:
        name, colon, allowed = row.partition(":")
        name = name.strip()
        if not colon or not name or name in table:
            raise ValueError(f"not a row, or the second of its name: {row!r}")
        table[name] = frozenset(allowed.split())
    return table


def room_of(module: str, rooms: Iterable[str]) -> str | None:
    """The longest room name that is the module or a package around it."""
    around = [r for r in rooms if module == r or module.startswith(f"{r}.")]
    return max(around, key=len, default=None)


def links(graph: ImportGraph, root: str) -> Iterator[Link]:
    """Every (importer, imported) whose importer lies in the root package, sorted."""
    for importer in sorted(graph.modules):
        if importer == root or importer.startswith(f"{root}."):
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                yield importer, imported


class _TableContract(Contract):
    """What both have in common: links are judged one by one and printed with their lines."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        root = self.session_options["root_packages"][0]
        broken = [
            (link, reason, [d["line_number"] for d in graph.get_import_details(
                importer=link[0], imported=link[1])])
            for link in links(graph, root)
            if (reason := self.objection(link, root))
        ]  # fmt: skip
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def objection(self, link: Link, root: str) -> str | None:
        """Why this import is refused, or None."""
        raise NotImplementedError

    def render_broken_contract(self, check: ContractCheck) -> None:
        for (importer, imported), reason, lines in check.metadata["broken"]:
            places = ", ".join(str(n) for n in lines)
            output.print_error(f"{importer} -> {imported} (l. {places}): {reason}", bold=False)
        output.new_line()


class RoomsContract(_TableContract):
    """`rooms`: a row per room of the package, with the rooms it may import directly.

    A room may always import itself. A module in no room is refused, so that a new room has to
    be given a row. The root package itself (its version) may be imported by all. `shared` names
    rooms that every room may import whose row is not empty.
    """

    type_name = "rooms"
    rooms: Any = fields.ListField(subfield=fields.StringField())
    shared: Any = fields.ListField(subfield=fields.StringField())

    def objection(self, link: Link, root: str) -> str | None:
        importer, imported = link
        table = parse(self.rooms)
        if not imported.startswith(f"{root}.") or importer == root:
            return None
        here, there = room_of(importer, table), room_of(imported, table)
        if here is None or there is None:
            return f"{importer if here is None else imported} stands in no row"
        if here == there or there in table[here] or (table[here] and there in self.shared):
            return None
        return f"{here} may not import {there}"


class OutsideContract(_TableContract):
    """`packages`: a row per third-party package with the only rooms that may import it.

    A name with a minus is an exception inside a larger one: ``app.auth -app.auth.tokens``.
    `stdlib_only` names the rooms that may import no third-party package at all.
    """

    type_name = "outside"
    packages: Any = fields.ListField(subfield=fields.StringField())
    stdlib_only: Any = fields.ListField(subfield=fields.StringField())

    def objection(self, link: Link, root: str) -> str | None:
        importer, imported = link
        if imported == root or imported.startswith(f"{root}."):
            return None
        table = parse(self.packages)
        package = imported.partition(".")[0]
        if package not in sys.stdlib_module_names and room_of(importer, self.stdlib_only):
            return "only the standard library is allowed here"
        if package not in table:
            return None
        place = room_of(importer, [name.removeprefix("-") for name in table[package]])
        if place not in table[package]:
            return f"{package} belongs to {' '.join(sorted(table[package]))}"
        return None
