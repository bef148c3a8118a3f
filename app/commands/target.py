"""Which gateway and engine a command talks to, and with which token.

Flags come first, then the environment, then the user's own login at that gateway, then a demo that
runs here: its ready file names all of it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands.ending import CommandFailed, Exit, usage

DEMO_DIR = Path(".data/demo")
READY_FILE = "ready.json"

Url = Annotated[
    str | None, typer.Option("--url", envvar="CHADBURN_URL", help="Address of the gateway.")
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="CHADBURN_TOKEN",
        help="Bearer token. The variable is better: others can read the arguments of a process.",
    ),
]
DemoDir = Annotated[
    Path,
    typer.Option(
        "--demo-dir", envvar="CHADBURN_DEMO__DIR", help="Where a running demo keeps its data."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a demo writes once all of it answers. Tokens by role."""

    base_url: str
    issuer: str
    engine: str
    inference_address: str
    admin_address: str
    tokens: Mapping[str, str] = field(repr=False)
    data_dir: Path


@dataclass(frozen=True, slots=True)
class Target:
    """A base URL without the slash at its end, and the token that goes there and nowhere else:
    asked for anew for each request, as that of a login is renewed meanwhile."""

    url: str
    token: Callable[[], str] = field(repr=False)


def read_ready(directory: Path) -> Ready | None:
    """None: no demo is ready there. CommandFailed for a file that cannot be read."""
    path = directory / READY_FILE
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        return Ready(
            base_url=str(found["base_url"]),
            issuer=str(found["issuer"]),
            engine=str(found["engine"]),
            inference_address=str(found["inference_address"]),
            admin_address=str(found["admin_address"]),
            tokens={str(role): str(token) for role, token in found["tokens"].items()},
            data_dir=Path(found["data_dir"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        line = f"{path} cannot be read as a demo's ready file ({type(error).__name__})"
        raise CommandFailed(Exit.USAGE, line) from error


def gateway(url: str | None, token: str | None, demo_dir: Path) -> Target:
    """Raises CommandFailed where something is missing."""
    base = url.rstrip("/") if url else None
    if base is not None and not base.startswith(("http://", "https://")):
        raise usage("--url needs http:// or https:// in front")
    if base is not None and "@" in base.partition("//")[2].partition("/")[0]:
        raise usage("--url has no user or password; what lets you in is the token")
    if base is not None and (shown := _shown(base, token)):
        return Target(base, shown)
    ready = read_ready(demo_dir)
    if ready is None:
        missing = "--url and --token" if not (base or token) else "--token" if base else "--url"
        login = "; or log in first (chadburn login)" if base else ""
        raise usage(
            f"give {missing}; no demo is ready in {demo_dir} whose address could serve{login}"
        )
    # The demo's operator token is for the demo's own gateway and for no other address.
    if base is not None and base != ready.base_url.rstrip("/"):
        raise usage(
            "give --token: the demo that runs here has another address than --url;"
            " or log in first (chadburn login)"
        )
    address = ready.base_url.rstrip("/")
    return Target(address, _shown(address, token) or (lambda: plain(ready.tokens["operator"])))


def _shown(base: str, token: str | None) -> Callable[[], str] | None:
    """The token that was given, or that of a login there."""
    if token:
        given = plain(token)
        return lambda: given
    return login_at(base)


def login_at(gateway: str) -> Callable[[], str] | None:
    """The token of the user's own login there, renewed where it is due. None: there is no login.
    Raises CommandFailed, both."""
    from app.commands.login.keeping import Logins, user_folder
    from app.commands.login.places import base_url

    folder = user_folder(os.environ)
    logins = None if folder is None else Logins(folder)
    kept = None if logins is None else logins.read(base_url(gateway))
    if logins is None or kept is None:
        return None
    # It brings Authlib with it, which a command without a login does without.
    from app.commands.login.bearing import Bearer

    return Bearer(logins, kept, time.time, os.environ)


def plain(token: str) -> str:
    """A token as a header can carry it. The line never repeats it."""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise usage("the token has characters that no token has: white space, or beyond ASCII")
    return token
