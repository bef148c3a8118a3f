"""`chadburn ops`: orders that were given, and what became of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated
from urllib.parse import quote

import typer

from app.commands.ending import usage
from app.commands.following import StreamEvent, follow
from app.commands.http import compact, connected
from app.commands.ordering import followed, teller
from app.commands.printing import event_line, exit_of, operation_line, show, table
from app.commands.target import DEMO_DIR, DemoDir, Token, Url, gateway
from app.domain.kinds import OperationKind, OperationState

app = typer.Typer(help="List, read, watch, cancel and settle operations.", no_args_is_help=True)


class Stated(StrEnum):
    """How a person may say that an operation ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


OperationId = Annotated[str, typer.Argument(metavar="OPERATION", help="Id of the operation.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@app.command("list")
def list_operations(
    engine: Annotated[str | None, typer.Option(help="Only of this engine.")] = None,
    kind: Annotated[OperationKind | None, typer.Option(help="Only of this kind.")] = None,
    state: Annotated[OperationState | None, typer.Option(help="Only in this state.")] = None,
    key: Annotated[str | None, typer.Option(help="Only ordered under this key.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 50,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Operations, the newest first."""
    found = []
    with connected(gateway(url, token, demo_dir)) as calls:
        for operation in calls.pages(
            "/v1/operations",
            engine=engine,
            kind=kind.value if kind else None,
            state=state.value if state else None,
            idempotency_key=key,
            page_size=min(limit, 100),
        ):
            found.append(operation)
            if len(found) == limit:
                break
    if as_json:
        show({"items": found})
        return
    rows = [
        [item["created_at"], item["engine"], item["kind"], item["state"], _who(item), item["id"]]
        for item in found
    ]
    print(table(rows, ("CREATED", "ENGINE", "KIND", "STATE", "BY", "OPERATION")))


@app.command("get")
def get_operation(
    operation: OperationId,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """One operation; the exit code tells its outcome."""
    with connected(gateway(url, token, demo_dir)) as calls:
        found = calls.get(_path(operation))
    if as_json:
        show(found)
    else:
        print(operation_line(found))
    raise typer.Exit(exit_of(found))


@app.command("watch")
def watch_operation(
    operation: OperationId,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to watch.")] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document a line.")] = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """All events of an operation from the first to the end; the exit code tells its outcome."""

    def tell(event: StreamEvent) -> None:
        print(compact(event.data) if as_json else event_line(event), flush=True)

    _path(operation)
    with connected(gateway(url, token, demo_dir)) as calls:
        found = follow(calls, operation, timeout_s=timeout, tell=tell)
    raise typer.Exit(exit_of(found))


@app.command("cancel")
def cancel_operation(
    operation: OperationId,
    reason: Annotated[str | None, typer.Option(help="Kept in the audit.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to its end.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that --wait waits.")] = 600.0,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Ask for the end of an operation. With --wait, exit code 4 says that it was cancelled."""
    body = {} if reason is None else {"reason": reason}
    with connected(gateway(url, token, demo_dir)) as calls:
        found = calls.post(f"{_path(operation)}/cancel", body)
        if wait and not found["done"]:
            found = followed(calls, operation, timeout, teller(as_json))
    if as_json:
        show(found)
    else:
        print(operation_line(found))
    raise typer.Exit(exit_of(found))


@app.command("settle")
def settle_operation(
    operation: OperationId,
    outcome: Annotated[Stated, typer.Option(help="How it ended.")],
    reason: Annotated[str, typer.Option(help="How you know. Kept with it and in the audit.")],
    message: Annotated[
        str | None, typer.Option(help="What a failure says of itself; else the reason.")
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """State the end of an operation that is reconciling, and free its engine.

    Nothing is asked of the engine. Exit code 0 says that it is settled, whatever was stated.
    """
    body = {"outcome": outcome.value, "reason": reason}
    if message is not None:
        body["message"] = message
    with connected(gateway(url, token, demo_dir)) as calls:
        found = calls.post(f"{_path(operation)}/settle", body)
    if as_json:
        show(found)
    else:
        print(operation_line(found))


def _path(operation: str) -> str:
    if operation in {"", ".", ".."} or "/" in operation:
        raise usage("an operation's id is not empty and has no slash")
    return f"/v1/operations/{quote(operation, safe='')}"


def _who(operation: dict[str, dict[str, str]]) -> str:
    return (operation.get("principal") or {}).get("subject", "-")
