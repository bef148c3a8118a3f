"""`chadburn engines`: the fleet as the gateway knows it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from app.clock import rfc3339
from app.commands.ending import usage
from app.commands.http import Json, connected
from app.commands.orders import EngineId, engine_path
from app.commands.printing import show, table
from app.commands.target import DEMO_DIR, DemoDir, Token, Url, gateway
from app.domain.engine import Dialect

app = typer.Typer(help="List, look at, register, change and freeze engines.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
Shared = Annotated[
    bool,
    typer.Option(
        "--allow-shared-address", help="Also where another engine has one of the addresses."
    ),
]


@app.command("list")
def list_engines(
    label: Annotated[
        list[str] | None, typer.Option(help="Only those with this label, as name=value.")
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """All engines in the register."""
    with connected(gateway(url, token, demo_dir)) as calls:
        found = list(calls.pages("/v1/engines", label=label))
    if as_json:
        show({"items": found})
        return
    heads = ("ENGINE", "DIALECT", "HEALTH", "ADMISSION", "PAUSE", "REVISION", "RUNNING", "FROZEN")
    print(table([_row(engine) for engine in found], heads))


@app.command("get")
def get_engine(
    engine: EngineId,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """One engine with everything that is known of it, as JSON."""
    with connected(gateway(url, token, demo_dir)) as calls:
        show(calls.get(engine_path(engine)))


@app.command("register")
def register_engine(
    engine: EngineId,
    admin: Annotated[
        list[str],
        typer.Option(
            help="Address that takes orders: host:port or unix:/path. With dialect vllm once for "
            "each member, by rank."
        ),
    ],
    control: Annotated[
        list[str] | None, typer.Option(help="Address that is read, as often; else the same.")
    ] = None,
    dialect: Annotated[Dialect, typer.Option(help="What it speaks.")] = Dialect.OPENENGINE,
    server_name: Annotated[
        str | None, typer.Option(help="Name that its certificate must show.")
    ] = None,
    credential: Annotated[
        str | None, typer.Option(help="Name of the credential in the gateway's settings.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="name=value, once per label.")] = None,
    shared: Shared = False,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Tell the gateway of an engine."""
    read_at = control or admin
    if len(read_at) != len(admin):
        raise usage("--control goes with each --admin, or with none")
    body = registration(
        engine,
        dialect=dialect,
        members=list(zip(admin, read_at, strict=True)),
        server_name=server_name,
        credential=credential,
        labels=dict(_pair(text) for text in label or []),
    )
    if shared:
        body["allow_shared_address"] = True
    with connected(gateway(url, token, demo_dir)) as calls:
        made = calls.post("/v1/engines", body)
    if as_json:
        show(made)
    else:
        print(f"{made['id']}  registered  health {made['health']['state']}")


@app.command("update")
def update_engine(
    engine: EngineId,
    admin: Annotated[
        list[str] | None, typer.Option(help="New address that takes orders, for each member.")
    ] = None,
    control: Annotated[
        list[str] | None, typer.Option(help="Address that is read, as often; else the same.")
    ] = None,
    server_name: Annotated[
        str | None, typer.Option(help="Name that its certificate must show; '' for none.")
    ] = None,
    credential: Annotated[
        str | None, typer.Option(help="Name of the credential in the settings; '' for none.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="name=value, set beside the others.")
    ] = None,
    without_label: Annotated[
        list[str] | None, typer.Option(help="Name of a label that it is to lose.")
    ] = None,
    shared: Shared = False,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Change what the gateway knows an engine by; what is not named stays.

    Holds only if nobody else changes the registration meanwhile.
    """
    given = (admin, server_name, credential, label, without_label)
    if all(one is None for one in given):
        raise usage("say what to change")
    if control is not None and len(control) != len(admin or ()):
        raise usage("--control goes with each --admin, or with none")
    labels = dict(_pair(text) for text in label or [])
    with connected(gateway(url, token, demo_dir)) as calls:
        known = calls.get(engine_path(engine))
        body: Json = {}
        if admin is not None:
            body["members"] = _members(list(zip(admin, control or admin, strict=True)))
        if server_name is not None or credential is not None:
            # One member of the body, which takes the place of both.
            names = {"server_name": server_name, "credential": credential}
            said = {name: value for name, value in names.items() if value is not None}
            body["tls"] = {name: value or None for name, value in (known["tls"] | said).items()}
        if label is not None or without_label is not None:
            kept = {**known["labels"], **labels}
            body["labels"] = {k: v for k, v in kept.items() if k not in (without_label or ())}
        if shared:
            body["allow_shared_address"] = True
        same = {"If-Match": f'"g{known["generation"]}"'}
        made = calls.post(engine_path(engine), body, same, method="PATCH")
    if as_json:
        show(made)
    else:
        print(f"{made['id']}  changed  generation {made['generation']}")


@app.command("freeze")
def freeze_engine(
    engine: EngineId,
    reason: Annotated[str, typer.Option(help="Told to everybody whose order is refused.")],
    until: Annotated[
        str | None, typer.Option(help="Until when, such as 2026-03-01T12:00:00Z.")
    ] = None,
    minutes: Annotated[
        int | None, typer.Option(min=1, help="Instead: for so long, by this machine's clock.")
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Have an engine take no new orders for a time; what runs goes on."""
    if (until is None) == (minutes is None):
        raise usage("say --until TIME or --minutes N")
    end = until or rfc3339(datetime.now(UTC) + timedelta(minutes=minutes or 0))
    body = {"reason": reason, "until": end}
    with connected(gateway(url, token, demo_dir)) as calls:
        found = calls.post(engine_path(engine, "/freeze"), body, method="PUT")
    if as_json:
        show(found)
    else:
        print(f"{found['id']}  frozen until {found['frozen']['until']}")


@app.command("thaw")
def thaw_engine(
    engine: EngineId,
    reason: Annotated[str | None, typer.Option(help="Kept in the audit.")] = None,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Let an engine take orders again before its freeze is over."""
    with connected(gateway(url, token, demo_dir)) as calls:
        calls.delete(engine_path(engine, "/freeze"), reason=reason)
    print(f"{engine}  thawed")


def registration(
    engine: str,
    *,
    dialect: Dialect,
    members: list[tuple[str, str]],
    server_name: str | None,
    credential: str | None,
    labels: dict[str, str],
) -> Json:
    """Body of POST /v1/engines. `members`: admin and control address of each, by rank."""
    body: Json = {
        "id": engine,
        "dialect": dialect.value,
        "members": _members(members),
        "labels": labels,
    }
    names = {"server_name": server_name, "credential": credential}
    tls = {name: value for name, value in names.items() if value is not None}
    return body | {"tls": tls} if tls else body


def _members(addresses: list[tuple[str, str]]) -> list[Json]:
    return [
        {"rank": rank, "admin": admin, "control": control}
        for rank, (admin, control) in enumerate(addresses)
    ]


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise usage("a label is name=value")
    return name, value


def _row(engine: Json) -> list[Any]:
    facts = engine.get("facts") or {}
    pause = facts.get("pause")
    revision = engine.get("revision")
    return [
        engine["id"],
        engine["dialect"],
        (engine.get("health") or {}).get("state"),
        facts.get("admission"),
        _pause(pause) if pause else None,
        f"r{revision}" if revision is not None else None,
        engine.get("running_operation"),
        (engine.get("frozen") or {}).get("until"),
    ]


def _pause(pause: Json) -> str:
    """A drain has no epoch before it has taken effect."""
    return f"{pause['mode']} epoch {pause['epoch']}" if pause["epoch"] else str(pause["mode"])
