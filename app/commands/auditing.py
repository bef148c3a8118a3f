"""Commands for the audit as it lies in the database."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.clock import rfc3339
from app.commands.database import AsJson, done
from app.commands.ending import CommandFailed, Exit, usage
from app.commands.http import compact
from app.commands.serving import Config, settings_of

if TYPE_CHECKING:
    from app.ledger.chain import Verdict
    from app.ledger.values import Seal

_DIGEST = re.compile(r"[0-9a-f]{64}")

audit = typer.Typer(help="The audit as it lies in the database.", no_args_is_help=True)


@audit.callback()
def root() -> None:
    """The audit as it lies in the database."""


@audit.command()
def verify(
    config: Config = None,
    from_seal: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST",
            help="A head that was printed before and kept elsewhere: it has to be in the chain, "
            "and what follows it is verified. So a chain that was made anew is found.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute the seals of the audit; changes nothing, and a gateway may run meanwhile.

    Ends with 3 if an entry was changed, removed or put in after it was sealed, and names it.
    """
    from app.ledger.chain import verify as verify_chain

    if from_seal is not None and not _DIGEST.fullmatch(from_seal):
        raise usage("--from-seal: the 64 hex digits of a head")
    settings = settings_of(config, {})
    verdict = done(lambda: verify_chain(settings.ledger_url, from_seal))
    if as_json:
        print(compact(_document(verdict)))
    else:
        print("\n".join(_lines(verdict)))
    broken = verdict.broken
    if broken is not None:
        where = f"seal {broken.number}" if broken.number else "the chain"
        more = "" if len(verdict.breaks) == 1 else f"; {len(verdict.breaks) - 1} more do not hold"
        raise CommandFailed(Exit.FAILED, f"{where} does not hold: {broken.message}{more}")


def _lines(verdict: Verdict) -> list[str]:
    lines = []
    if verdict.pruned is not None and verdict.pruned.pruned_at is not None:
        at = rfc3339(verdict.pruned.pruned_at)
        lines.append(f"pruned: entries up to {verdict.pruned.to_id} are kept no longer, since {at}")
    lines.append(f"verified: {verdict.rows} entries under {verdict.seals} seals")
    tail, head = verdict.unsealed, verdict.head
    for broken in verdict.breaks:
        if not broken.number:
            continue  # none that is there
        lines.append(f"broken: seal {broken.number}, entries {broken.from_id} to {broken.to_id}")
        if not broken.entries:
            lines.append(f"  {broken.message}")
        lines += [f"  entry {one} was {how}" for one, how in broken.entries.items()]
    if tail.rows:
        since = "" if tail.oldest_at is None else f", since {rfc3339(tail.oldest_at)}"
        lines.append(f"unsealed: {tail.rows} entries, {tail.from_id} to {tail.to_id}{since}")
    else:
        lines.append("unsealed: none")
    if head is not None:
        lines.append(f"head: {head.digest} (seal {head.number}, {rfc3339(head.sealed_at)})")
    return lines


def _document(verdict: Verdict) -> dict[str, Any]:
    tail = verdict.unsealed
    return {
        "intact": not verdict.breaks,
        "verified_entries": verdict.rows,
        "verified_seals": verdict.seals,
        "pruned_to": None if verdict.pruned is None else verdict.pruned.to_id,
        "broken": [asdict(broken) for broken in verdict.breaks],
        "unsealed": {
            "entries": tail.rows,
            "from_id": tail.from_id,
            "to_id": tail.to_id,
            "oldest_at": None if tail.oldest_at is None else rfc3339(tail.oldest_at),
            "newest_at": None if tail.newest_at is None else rfc3339(tail.newest_at),
        },
        "head": None if verdict.head is None else _seal(verdict.head),
    }


def _seal(seal: Seal) -> dict[str, Any]:
    return {
        "digest": seal.digest,
        "number": seal.number,
        "to_id": seal.to_id,
        "sealed_at": rfc3339(seal.sealed_at),
    }
