"""What a gateway says of its issuers (RFC 9728), and an issuer of its endpoints (RFC 8414)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from app.auth.tokens.fetch import discovery_urls
from app.auth.tokens.issuers import is_allowed_url
from app.commands.ending import CommandFailed, Exit, usage
from app.commands.login.asking import fetch
from app.commands.login.places import base_url, is_issuer, is_loopback, is_plain, is_private, said

WELL_KNOWN = "/.well-known/oauth-protected-resource"


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """A gateway. ``audiences``: by issuer, where the gateway says what its tokens are for."""

    url: str
    issuers: tuple[str, ...]
    scopes: tuple[str, ...]
    audiences: Mapping[str, str]

    def issuer(self, wanted: str | None) -> str:
        """The one to log in at. Raises CommandFailed.

        A gateway may name no issuer that would be asked in the clear, and one on another machine
        none on this one: it would have us send requests where it can't.
        """
        if wanted is not None:
            if not is_issuer(wanted):
                raise usage("--issuer must be an https address, or http on this machine")
            if wanted not in self.issuers:
                named = ", ".join(map(said, self.issuers)) or "none"
                raise usage(f"{self.url} takes no tokens of that issuer; of these: {named}")
            return wanted
        if len(self.issuers) != 1:
            named = ", ".join(map(said, self.issuers)) or "none"
            raise usage(f"name one of the gateway's issuers with --issuer; it has: {named}")
        (only,) = self.issuers
        near = is_loopback(self.url) or only.startswith("https://")
        if not is_issuer(only) or not near:
            line = f"{self.url} names an issuer that is not to be trusted for that: {said(only)}"
            raise CommandFailed(Exit.REFUSED, line)
        return only


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerEndpoints:
    """None: it does not offer that. ``scopes``: None where it does not say."""

    issuer: str
    token: str
    device: str | None
    revocation: str | None
    scopes: frozenset[str] | None

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.issuer)


def read_gateway(url: str) -> Protected:
    """``url`` as `base_url` writes it. Raises CommandFailed."""
    if not is_private(url):
        raise usage("only a gateway at https, or on this machine, can be believed: --url https://…")
    parts = urlsplit(url)
    found = _document(f"{parts.scheme}://{parts.netloc}{WELL_KNOWN}{parts.path}")
    if found is None:
        line = f"{url} does not say whose tokens it takes: is it a gateway of Chadburn?"
        raise CommandFailed(Exit.REFUSED, line)
    # RFC 9728 §3.3. Else one address could have a login made that is good at another.
    own = found.get("resource")
    if not isinstance(own, str) or _same(own) != url:
        raise CommandFailed(
            Exit.REFUSED, f"the gateway at {url} calls itself {said(own)}: use that"
        )
    audiences = found.get("chadburn_audiences")
    return Protected(
        url=url,
        issuers=_texts(found.get("authorization_servers")),
        scopes=_texts(found.get("scopes_supported")),
        audiences={
            issuer: audience
            for issuer, audience in (audiences if isinstance(audiences, dict) else {}).items()
            if isinstance(audience, str)
        },
    )


def read_issuer(issuer: str) -> IssuerEndpoints:
    """Its metadata, at the place of OpenID Connect Discovery or that of RFC 8414. Raises
    CommandFailed."""
    for url in discovery_urls(issuer):
        found = _document(url)
        if found is not None:
            break
    else:
        raise CommandFailed(Exit.REFUSED, f"{issuer} has no metadata, so it can't be used here")
    # Byte for byte (RFC 8414 §3.3), or a neighbour could have tokens sent to its own endpoints.
    if found.get("issuer") != issuer:
        raise CommandFailed(Exit.REFUSED, f"the metadata of {issuer} names another issuer")
    scopes = found.get("scopes_supported")
    token = _endpoint(issuer, found, "token_endpoint")
    if token is None:
        raise CommandFailed(Exit.REFUSED, f"{issuer} has no token endpoint")
    return IssuerEndpoints(
        issuer=issuer,
        token=token,
        device=_endpoint(issuer, found, "device_authorization_endpoint"),
        revocation=_endpoint(issuer, found, "revocation_endpoint"),
        scopes=None if scopes is None else frozenset(_texts(scopes)),
    )


def _endpoint(issuer: str, found: Mapping[str, Any], name: str) -> str | None:
    address = found.get(name)
    if address is None:
        return None
    good = isinstance(address, str) and is_plain(address)
    if not good or not is_allowed_url(address, allow_http=is_loopback(issuer)):
        line = f"the metadata of {issuer} has a {name} that is not to be trusted"
        raise CommandFailed(Exit.REFUSED, line)
    return str(address)


def _document(url: str) -> dict[str, Any] | None:
    """A JSON object; None: there is nothing."""
    answer = fetch(url)
    if answer.status_code in {404, 410}:
        return None
    if answer.status_code != 200:
        exit_ = Exit.UNREACHABLE if answer.status_code >= 429 else Exit.REFUSED
        raise CommandFailed(exit_, f"{url} answered {answer.status_code}")
    try:
        found = json.loads(answer.content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CommandFailed(
            Exit.UNREACHABLE, f"{url} answered with something that is no JSON object"
        )
    return found


def _same(resource: str) -> str | None:
    try:
        return base_url(resource)
    except CommandFailed:
        return None


def _texts(found: object) -> tuple[str, ...]:
    """Those that can be shown and sent."""
    listed = found if isinstance(found, list) else []
    return tuple(text for text in listed if isinstance(text, str) and is_plain(text))
