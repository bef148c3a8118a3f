"""`chadburn login` and `chadburn logout`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import webbrowser
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.ending import CommandFailed, usage
from app.commands.target import DEMO_DIR, DemoDir, Url, read_ready

if TYPE_CHECKING:
    from app.commands.login.asking import AskedAs, Tokens
    from app.commands.login.device import Begun
    from app.commands.login.keeping import Kept, Logins, Secret
    from app.commands.login.metadata import IssuerEndpoints, Protected

CLIENT_ID = "chadburn"
# It lets an engine unpickle what it is sent; who needs it asks for it.
_NOT_BY_ITSELF = frozenset(["admin:weights.unsafe"])


class ClientAuth(StrEnum):
    """How a client's secret is shown (RFC 6749 §2.3.1)."""

    BASIC = "basic"
    POST = "post"


def login(
    url: Url = None,
    issuer: Annotated[
        str | None, typer.Option(help="Where the gateway takes tokens of several issuers.")
    ] = None,
    client_id: Annotated[
        str, typer.Option(envvar="CHADBURN_CLIENT_ID", help="What the issuer knows us as.")
    ] = CLIENT_ID,
    scope: Annotated[
        list[str] | None, typer.Option(help="Once per scope; else all that the gateway has.")
    ] = None,
    resource: Annotated[
        str | None,
        typer.Option(help="What the token is to be for (RFC 8707); else what the gateway says."),
    ] = None,
    audience: Annotated[
        str | None, typer.Option(help="The same for issuers that call it so (Auth0).")
    ] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only print where to go.")
    ] = False,
    client_credentials: Annotated[
        bool,
        typer.Option(
            "--client-credentials",
            help="As a program: its secret is in CHADBURN_CLIENT_SECRET, or in a file.",
        ),
    ] = False,
    client_secret_file: Annotated[
        Path | None,
        typer.Option(help="Read again for each new token; - is standard input, which is kept."),
    ] = None,
    client_auth: Annotated[
        ClientAuth, typer.Option(help="How the secret is shown.")
    ] = ClientAuth.BASIC,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Log in to a gateway, at its issuer and in a browser anywhere. Commands for this gateway then
    use the login, and renew its tokens."""
    from app.commands.login.keeping import user_logins
    from app.commands.login.metadata import read_gateway, read_issuer

    if client_secret_file is not None and not client_credentials:
        raise usage("--client-secret-file goes with --client-credentials")
    gateway = read_gateway(address(url, demo_dir))
    at = read_issuer(gateway.issuer(issuer))
    logins = user_logins(os.environ)
    asked = _parameters(gateway, at, resource=resource, audience=audience)
    scopes = [name for text in scope or [] for name in text.split()]
    if client_credentials:
        if scopes:
            asked["scope"] = " ".join(scopes)
        kept = _as_program(gateway, at, client_id, client_auth, client_secret_file, asked)
    else:
        asked["scope"] = " ".join(scopes or _all_scopes(gateway, at))
        kept = _as_person(gateway, at, client_id, asked, browser=not no_browser)
    who = _checked(kept, at)
    with logins.held(gateway.url) as held, held.place() as put:
        before = _readable(logins, gateway.url)
        put(kept)
    if before is not None and _is_apart(before, kept):
        try:
            _revoke(before)
        except CommandFailed as failed:
            _tell(f"the issuer may still take the tokens of the login before: {failed.line}")
    print(f"logged in at {gateway.url} as {who}")


def logout(url: Url = None, demo_dir: DemoDir = DEMO_DIR) -> None:
    """End a login: tell its issuer, and delete what is kept of it."""
    from app.commands.login.keeping import user_logins

    gateway = address(url, demo_dir)
    logins = user_logins(os.environ)
    if logins.read(gateway) is None:
        if logins.folder.is_dir():
            with logins.held(gateway) as held:
                held.clear()
        print(f"not logged in at {gateway}")
        return
    with logins.held(gateway) as held:
        kept = logins.read(gateway)
        held.remove()
    if kept is not None:
        try:
            told = _revoke(kept)
        except CommandFailed as failed:
            line = f"deleted here, but its issuer may still take its tokens: {failed.line}"
            raise CommandFailed(failed.exit, line) from failed
        if not told:
            print("the issuer offers no revocation: its tokens last until they expire")
    print(f"logged out at {gateway}")


def address(url: str | None, demo_dir: Path) -> str:
    """That of the gateway meant: the one named, or that of the demo that runs here. Raises
    CommandFailed."""
    from app.commands.login.places import base_url

    if url:
        return base_url(url)
    ready = read_ready(demo_dir)
    if ready is None:
        raise usage(f"give --url; no demo is ready in {demo_dir}")
    return base_url(ready.base_url)


def _as_person(
    gateway: Protected,
    at: IssuerEndpoints,
    client_id: str,
    asked: dict[str, str],
    *,
    browser: bool,
) -> Kept:
    from app.commands.login.asking import AskedAs
    from app.commands.login.device import begin, wait

    who = AskedAs(client_id=client_id)
    begun = begin(at, who, asked)
    _show(begun, browser=browser)
    return _kept(gateway, at, who, wait(at, who, begun, say=_tell), asked)


def _as_program(
    gateway: Protected,
    at: IssuerEndpoints,
    client_id: str,
    client_auth: ClientAuth,
    secret_file: Path | None,
    asked: dict[str, str],
) -> Kept:
    from app.commands.login.asking import AskedAs, tokens
    from app.commands.login.bearing import secret_text

    secret = _secret(secret_file)
    who = AskedAs(
        client_id=client_id,
        auth=f"client_secret_{client_auth}",
        secret=secret_text(secret, os.environ),
    )
    found = tokens(at.token, who, "client_credentials", **asked)
    return _kept(gateway, at, who, found, asked, secret)


def _kept(
    gateway: Protected,
    at: IssuerEndpoints,
    who: AskedAs,
    found: Tokens,
    asked: dict[str, str],
    secret: Secret | None = None,
) -> Kept:
    from app.commands.login.keeping import Kept

    return Kept(
        gateway=gateway.url,
        issuer=at.issuer,
        client_id=who.client_id,
        auth=who.auth,
        secret=secret,
        parameters=asked,
        access_token=found.access_token,
        lifetime_s=found.lifetime_s,
        expires_at=time.time() + found.lifetime_s,
        refresh_token=found.refresh_token if secret is None else None,
        session=found.session,
    )


def _secret(path: Path | None) -> Secret:
    from app.commands.login.bearing import SECRET_VARIABLE
    from app.commands.login.keeping import Secret

    if path is None:
        return Secret(kind="variable", value=SECRET_VARIABLE)
    if str(path) != "-":
        return Secret(kind="file", value=str(path.absolute()))
    text = sys.stdin.read().strip()
    if not text:
        raise usage("standard input has no secret in it")
    return Secret(kind="kept", value=text)


def _parameters(
    gateway: Protected, at: IssuerEndpoints, *, resource: str | None, audience: str | None
) -> dict[str, str]:
    """What the token is to be for. The gateway's own word counts where it is what RFC 8707 lets a
    resource be: an absolute URI without a fragment."""
    said = gateway.audiences.get(at.issuer, "")
    if resource is None and said.startswith(("https://", "http://")) and "#" not in said:
        resource = said
    named = {"resource": resource, "audience": audience}
    return {name: text for name, text in named.items() if text}


def _all_scopes(gateway: Protected, at: IssuerEndpoints) -> list[str]:
    """Those of the gateway which the issuer has, where it says so of any of them."""
    wanted = [name for name in gateway.scopes if name not in _NOT_BY_ITSELF]
    known = at.scopes or frozenset()
    wanted = [name for name in wanted if name in known] or wanted
    return [*(name for name in ("openid", "offline_access") if name in known), *wanted]


def _show(begun: Begun, *, browser: bool) -> None:
    minutes = max(1, round(begun.lasts_s / 60))
    if begun.direct is not None:
        where = f"Open  {begun.direct}\nand compare the code there:  {begun.user_code}"
    else:
        where = f"Open  {begun.address}\nand type the code there:  {begun.user_code}"
    print(
        f"{where}\nWaiting for {minutes} min at most; Ctrl-C ends it.", file=sys.stderr, flush=True
    )
    # A browser that runs in the terminal would take it over, so only where there is a desktop.
    desktop = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if browser and desktop and sys.stderr.isatty():
        webbrowser.open(begun.direct or begun.address)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _readable(logins: Logins, gateway: str) -> Kept | None:
    """What is damaged, or others may read, is replaced all the same."""
    with contextlib.suppress(CommandFailed):
        return logins.read(gateway)
    return None


def _is_apart(before: Kept, now: Kept) -> bool:
    """Whether a person's login before is known to be another one at the issuer, so that its end is
    not that of the new one: issuers end with a refresh token all that came of the same login
    (RFC 7009 section 2.1), and may have given out more of it now."""
    if before.refresh_token is None or before.refresh_token == now.refresh_token:
        return False
    if (before.issuer, before.client_id) != (now.issuer, now.client_id):
        return True
    return None not in (before.session, now.session) and before.session != now.session


def _checked(kept: Kept, at: IssuerEndpoints) -> str:
    """Who the gateway takes us for. A token that it refuses is not worth keeping. Raises
    CommandFailed."""
    from app.commands.http import Gateway
    from app.commands.login.places import said
    from app.commands.target import Target

    calls = Gateway(Target(kept.gateway, lambda: kept.access_token))
    try:
        me = calls.get("/v1/me")
    except CommandFailed as failed:
        with contextlib.suppress(CommandFailed):  # else it ends by itself
            _revoke(kept, at)
        line = f"{at.issuer} gave a token that the gateway does not take: {failed.line}"
        raise CommandFailed(failed.exit, line) from failed
    finally:
        calls.close()
    scopes = me.get("scopes")
    may = " ".join(map(str, scopes)) if isinstance(scopes, list) else ""
    return said(me.get("subject")) + (f" ({said(may)})" if may else "")


def _revoke(kept: Kept, at: IssuerEndpoints | None = None) -> bool:
    """Whether the issuer offers that. Raises CommandFailed."""
    from app.commands.login.asking import revoke
    from app.commands.login.bearing import asked_as, secret_text
    from app.commands.login.metadata import read_issuer

    at = at or read_issuer(kept.issuer)
    if at.revocation is None:
        return False
    who = asked_as(kept, None if kept.secret is None else secret_text(kept.secret, os.environ))
    if kept.refresh_token is not None:
        revoke(at.revocation, who, kept.refresh_token, "refresh_token")
    else:
        revoke(at.revocation, who, kept.access_token, "access_token")
    return True
