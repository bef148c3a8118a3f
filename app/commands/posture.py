"""`chadburn posture`: what the gateway would be open to."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.ending import CommandFailed, Exit, usage
from app.commands.http import compact
from app.commands.serving import Config, settings_of

if TYPE_CHECKING:
    from app.domain.engine import Registration
    from app.posture import Posture


def posture(
    config: Config = None,
    strict: Annotated[bool, typer.Option("--strict", help="End with 3 if it warns.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Say where the gateway would listen, whom it would trust, what each route takes, and what to
    think about. Starts nothing; reads the register of engines where there is one. Ends with 2 where
    a gateway would not start."""
    from app.main import posture_at
    from app.posture import DOES_NOT_START

    settings = settings_of(config, {})
    found = posture_at(settings, asyncio.run(_engines(settings.ledger_url)))
    print(compact(asdict(found)) if as_json else "\n".join(_lines(found)))
    for remark in found.warnings:
        if remark.code == DOES_NOT_START:
            raise usage(f"the gateway does not start: {remark.message}")
    if strict and found.warnings:
        raise CommandFailed(Exit.FAILED, f"{len(found.warnings)} warnings")


async def _engines(url: str) -> tuple[Registration, ...] | None:
    """None: there is no ledger, or it can't be read."""
    from app.domain.errors import ChadburnError
    from app.ledger.engines import registrations

    try:
        return await registrations(url)
    except ChadburnError:
        return None


def _lines(found: Posture) -> list[str]:
    lines = ["listeners"]
    for listener in found.listeners:
        facts = [
            "loopback" if listener.loopback else "other machines",
            "plaintext" if listener.plaintext else "TLS",
            "tokens" if listener.tokens else "no tokens",
        ]
        lines.append(f"  {listener.name} {listener.address}: {', '.join(facts)}")
    lines.append("issuers")
    for issuer in found.issuers:
        facts = [str(issuer.audience), issuer.profile, " ".join(issuer.algorithms)]
        if issuer.asked is not None:
            facts.append(f"asked about tokens: {issuer.asked}")
        if issuer.dpop != "off":
            facts.append(f"DPoP {issuer.dpop}")
        if issuer.login:
            facts.append("logins with a browser")
        lines.append(f"  {issuer.issuer}: {', '.join(facts)}")
    if found.identities:
        lines.append("known without a token, at compatible endpoints")
    for known in found.identities:
        facts = [known.way, known.place, " ".join(known.scopes), f"engines {known.engines}"]
        lines.append(f"  {known.name}: {', '.join(facts)}")
    lines.append("engines")
    if found.engines is None:
        lines.append("  the register could not be read")
    for link in found.engines or ():
        shown = f"credential {link.credential}" if link.credential else "no credential"
        facts = ["TLS" if link.encrypted else "plaintext", shown]
        lines.append(f"  {link.engine}: {', '.join(facts)}{', loopback' if link.loopback else ''}")
    lines.append("open to all")
    lines += [f"  {route.method} {route.path}" for route in found.routes if route.scopes is None]
    lines.append("scopes")
    for route in found.routes:
        if route.scopes is not None:
            needed = " ".join(route.scopes) or "any admin scope"
            needed += " and the scope of the operation's kind" if route.of_kind else ""
            person = ", a person" if route.person else ""
            lines.append(f"  {route.method} {route.path}: {needed}{person}")
    lines.append("warnings" if found.warnings else "warnings: none")
    lines += [f"  {one.code} ({one.about}): {one.message}" for one in found.warnings]
    return lines
