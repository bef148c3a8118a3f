"""What all order verbs share: their common options, and giving and following one order."""

from __future__ import annotations

import inspect
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import typer

from app.commands.ending import CommandFailed, Exit, OutcomeLost, usage
from app.commands.following import StreamEvent, follow
from app.commands.http import Gateway, Json, connected
from app.commands.printing import event_line, exit_of, operation_line, show
from app.commands.target import DEMO_DIR, DemoDir, Token, Url, gateway
from app.domain.errors import MalformedIdempotencyKey
from app.domain.idempotency import check_key


@dataclass(frozen=True, slots=True)
class Order:
    """One order: where it is posted, with which body. `revision`: the one it was decided on;
    `read`: the options that say what was then read, so that the same order can be given again."""

    path: str
    body: Json
    revision: int | None = None
    read: str = ""
    method: str = "POST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How an order is given, whatever it is."""

    wait: bool
    timeout_s: float
    as_json: bool
    key: str | None
    reason: str | None
    dry_run: bool
    deadline_ms: int | None
    revision: int | None
    override_freeze: bool
    queue: bool


def manner(
    wait: Annotated[bool, typer.Option("--wait", help="Follow the operation to its end.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that --wait waits.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="The operation as JSON.")] = False,
    key: Annotated[str | None, typer.Option(help="Idempotency key; else a new one.")] = None,
    reason: Annotated[str | None, typer.Option(help="Kept with operation and audit.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, order nothing.")] = False,
    deadline_ms: Annotated[int | None, typer.Option(min=1, help="Longest it may take.")] = None,
    if_revision: Annotated[
        int | None, typer.Option(min=0, help="Refuse unless the engine is at this revision.")
    ] = None,
    override_freeze: Annotated[
        bool, typer.Option("--override-freeze", help="Also while the engine is frozen.")
    ] = False,
    queue: Annotated[
        bool, typer.Option("--queue", help="Wait behind a running order, and do not be refused.")
    ] = False,
) -> Manner:
    return Manner(
        wait=wait,
        timeout_s=timeout,
        as_json=as_json,
        key=key,
        reason=reason,
        dry_run=dry_run,
        deadline_ms=deadline_ms,
        revision=if_revision,
        override_freeze=override_freeze,
        queue=queue,
    )


def target(url: Url = None, token: Token = None, demo_dir: DemoDir = DEMO_DIR) -> Any:
    return gateway(url, token, demo_dir)


def verb(decide: Callable[..., Order]) -> Callable[..., None]:
    """A command from a function of (gateway, its own options) that decides the order.

    The command has the options of `manner` and `target` besides, without each verb repeating them.
    """

    own, common, where = (
        inspect.signature(function, eval_str=True).parameters
        for function in (decide, manner, target)
    )

    @wraps(decide)
    def command(**given: Any) -> None:
        how = manner(**{name: given.pop(name) for name in common})
        with connected(target(**{name: given.pop(name) for name in where})) as calls:
            give(calls, decide(calls, **given), how)

    options = [*list(own.values())[1:], *common.values(), *where.values()]
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [option.replace(kind=keyword_only) for option in options]
    )
    return command


def give(calls: Gateway, order: Order, how: Manner) -> None:
    """Raises typer.Exit with the code of the outcome, or CommandFailed."""
    common = {
        "reason": how.reason,
        "deadline_ms": how.deadline_ms,
        "when_busy": "queue" if how.queue else None,
    }
    body = order.body | {name: value for name, value in common.items() if value is not None}
    if how.override_freeze:
        body["override_freeze"] = True
    headers: dict[str, str] = {}
    revision = how.revision if how.revision is not None else order.revision
    if revision is not None:
        headers["if-match"] = f'"r{revision}"'
    if how.dry_run:
        plan = calls.post(order.path, {**body, "dry_run": True}, headers, method=order.method)
        show(plan)
        return
    key = _key(how.key)
    again = [f"--key {key}", *filter(None, [order.read])]
    if how.revision is None and revision is not None:
        again.append(f"--if-revision {revision}")
    headers["idempotency-key"] = key
    operation = _accepted(calls, order, body, headers, " ".join(again))
    if how.wait and not operation["done"]:
        operation = followed(calls, operation["id"], how.timeout_s, teller(how.as_json))
    if how.as_json:
        show(operation)
    else:
        print(operation_line(operation))
    raise typer.Exit(exit_of(operation))


def _key(given: str | None) -> str:
    try:
        return str(uuid.uuid4()) if given is None else check_key(given)
    except MalformedIdempotencyKey as error:
        raise usage(f"--key: {error.message}") from error


def followed(
    calls: Gateway, operation_id: str, timeout_s: float, tell: Callable[[StreamEvent], None]
) -> Json:
    """`follow` for an order that has been taken: whatever ends the waiting, the order goes on, and
    the code must not say otherwise."""
    try:
        return follow(calls, operation_id, timeout_s=timeout_s, tell=tell)
    except CommandFailed as failed:
        raise CommandFailed(Exit.UNKNOWN, f"{failed.line}; {_goes_on(operation_id)}") from failed
    except KeyboardInterrupt:
        raise CommandFailed(Exit.INTERRUPTED, _goes_on(operation_id)) from None


def _goes_on(operation_id: str) -> str:
    return f"the operation goes on: chadburn ops watch {operation_id}"


def _accepted(
    calls: Gateway, order: Order, body: Json, headers: dict[str, str], again: str
) -> Json:
    try:
        return calls.post(order.path, body, headers, method=order.method)
    except OutcomeLost as lost:
        line = f"{lost.line}; whether it was taken is not known, so repeat it with {again}"
        raise CommandFailed(lost.exit, line) from lost


def teller(as_json: bool) -> Callable[[StreamEvent], None]:
    """Progress goes to stderr, so that stdout holds the outcome alone."""
    if as_json:
        return lambda _event: None
    return lambda event: print(event_line(event), file=sys.stderr, flush=True)
