"""Commands for the ledger's database: its schema, whether it is sound, and what is kept in it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any, TypeVar

import typer

from app.commands.ending import CommandFailed, Exit, usage
from app.commands.http import compact
from app.commands.serving import Config, settings_of
from app.domain.errors import ChadburnError, Unavailable

T = TypeVar("T")

AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]

_SHOWN = 20
_AGE = re.compile(r"([1-9][0-9]{0,5})(h|d)")
_TRIES = 100  # of a turn, with another process that prunes; a few seconds

db = typer.Typer(help="The ledger's database.", no_args_is_help=True)


@db.command()
def upgrade(
    config: Config = None,
    restored: Annotated[
        bool,
        typer.Option(
            "--restored",
            help="After a backup was restored: a new identity, so that no cursor from before is "
            "taken for one of the events to come, and an end for orders that were not sent when it "
            "was made. All gateways must be stopped.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the schema to this release's; creates the database where there is none."""
    from app.ledger.schema import upgrade as upgrade_ledger

    settings = settings_of(config, {})
    if settings.database_url is None:
        try:
            settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            line = f"the data directory {settings.data_dir} cannot be made: {error.strerror}"
            raise CommandFailed(Exit.UNREACHABLE, line) from error
    climb = done(lambda: upgrade_ledger(settings.ledger_url, restored=restored))
    ended = done(lambda: _end_unsent(settings.ledger_url)) if restored else 0
    if as_json:
        told = {"ended": ended} if restored else {}
        print(compact({"from": climb.before, "to": climb.after, **told}))
        return
    if climb.before == climb.after:
        print(f"schema {climb.after}: nothing to do")
    else:
        print(f"schema {climb.before or 'none'} -> {climb.after}")
    if restored:
        print(f"a new identity; {ended} operations that were not sent yet have ended")


async def _end_unsent(url: str) -> int:
    from app.clock import SystemClock
    from app.ledger import Ledger
    from app.ledger.recovery import end_unsent

    clock = SystemClock()
    ledger = await Ledger.open(url, clock=clock, pool_size=2)
    try:
        return await end_unsent(ledger, clock)
    finally:
        await ledger.close()


@db.command()
def check(config: Config = None, as_json: AsJson = False) -> None:
    """Say whether the schema can be used and what is in it agrees with itself; changes nothing.

    A gateway may run meanwhile. Ends with 3 if anything is wrong.
    """
    from app.clock import SystemClock
    from app.ledger.integrity import examine

    settings = settings_of(config, {})
    found = done(lambda: examine(settings.ledger_url, SystemClock()))
    if as_json:
        print(compact({**asdict(found), "sound": not found.findings}))
    else:
        print(_schema_line(found.schema.revision, found.schema.head))
        for finding in found.findings[:_SHOWN]:
            print(f"{finding.check} {finding.subject}: {finding.message}")
        print(
            f"{found.operations} operations, {found.events} events, {found.keys} keys, "
            f"{found.leases} leases: {'not sound' if found.findings else 'sound'}"
        )
    if found.findings:
        raise CommandFailed(Exit.FAILED, f"the ledger is not sound: {len(found.findings)} findings")


@db.command()
def prune(
    config: Config = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Operations that ended so long ago, such as 30d or 12h (1h at least); else "
            "operation_retention_days of the settings.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say how much it would be.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what is kept no longer, as a running gateway does by itself, a bit at a time."""
    from app.clock import Clock, SystemClock, uuid7
    from app.ledger import Ledger
    from app.ledger.pruning import Cutoffs, Run, preview
    from app.ledger.pruning import prune as prune_ledger
    from app.ledger.sealing import seal_all
    from app.ledger.values import AuditEntry

    settings = settings_of(config, {})
    age = timedelta(days=settings.operation_retention_days)
    if older_than is not None:
        age = _age_of(older_than)
    clock: Clock = SystemClock()
    now = clock.now()
    cutoffs = Cutoffs(now - age, now - timedelta(days=settings.audit_retention_days))

    async def run() -> Run:
        if dry_run:
            return Run(await preview(settings.ledger_url, now, cutoffs))
        ledger = await Ledger.open(settings.ledger_url, clock=clock, pool_size=2)
        try:
            # Of the audit only what is sealed goes. On PostgreSQL a running gateway may be at it.
            await seal_all(ledger.duties, ledger.sealing, f"cli:{uuid7()}")
            done = await prune_ledger(ledger.pruning, cutoffs, tries=_TRIES)
            if done.pruned:
                detail: dict[str, Any] = {
                    **asdict(done.pruned),
                    "older_than_s": age.total_seconds(),
                }
                entry = AuditEntry(
                    at=clock.now(), action="prune", outcome="succeeded", source="cli", detail=detail
                )
                await ledger.audit.append(entry)
            return done
        finally:
            await ledger.close()

    outcome = done(run)
    pruned = outcome.pruned
    if as_json:
        print(compact({**asdict(pruned), "dry_run": dry_run, "complete": not outcome.elsewhere}))
    else:
        print(
            f"{'would delete' if dry_run else 'deleted'} {pruned.operations} operations with "
            f"{pruned.events} events, {pruned.keys} keys, {pruned.audit} audit entries"
        )
    if outcome.elsewhere:
        raise CommandFailed(Exit.UNREACHABLE, "another process is pruning; the rest is left to it")


def _schema_line(revision: str, head: str) -> str:
    if revision == head:
        return f"schema {revision} is current"
    from app.ledger.schema import ReleaseSchema

    # By what the release has, not by their numbers: these need not rise.
    if ReleaseSchema().knows(revision):
        return f"schema {revision} can be used; this release has {head}: chadburn db upgrade"
    return f"schema {revision} is newer than this release ({head}) and can be used"


def _age_of(text: str) -> timedelta:
    found = _AGE.fullmatch(text)
    if found is None:
        raise usage("--older-than: so many hours or days, such as 12h or 30d")
    count = int(found[1])
    return timedelta(hours=count) if found[2] == "h" else timedelta(days=count)


def done(act: Callable[[], Awaitable[T]]) -> T:
    """What `act` gives; what it raises, as one line and a code."""
    from app.ledger.errors import LedgerInUse, SchemaBehind

    async def run() -> T:
        return await act()

    try:
        return asyncio.run(run())
    except SchemaBehind as error:
        raise CommandFailed(Exit.REFUSED, f"{error.message}: chadburn db upgrade") from error
    except LedgerInUse as error:
        line = f"{error.message}; a running gateway upgrades when it starts, and prunes by itself"
        raise CommandFailed(Exit.REFUSED, line) from error
    except Unavailable as error:
        raise CommandFailed(Exit.UNREACHABLE, f"{error.message}{_why(error)}") from error
    except ChadburnError as error:
        raise CommandFailed(Exit.REFUSED, error.message) from error


def _why(error: Unavailable) -> str:
    """The database's own words for whoever sits at the terminal. Drivers repeat no passwords."""
    lines = str(getattr(error.__cause__, "orig", None) or "").strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""
