"""Addresses of gateways and issuers, and which of them are trusted with what."""

from __future__ import annotations

import math
from urllib.parse import urlsplit

import httpx2

from app.auth.tokens.issuers import is_allowed_url, is_loopback_host
from app.commands.ending import usage


def base_url(text: str) -> str:
    """One way of writing each gateway's address: tokens are kept by it. Raises CommandFailed."""
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise usage(f"--url is no usable address: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise usage("--url needs http:// or https:// in front")
    if url.userinfo or url.query or url.fragment:
        raise usage("--url has more in it than an address")
    host = url.raw_host.decode("ascii")
    host = f"[{host}]" if ":" in host else host
    port = "" if url.port is None else f":{url.port}"
    return f"{url.scheme}://{host}{port}{url.path.rstrip('/')}"


def is_private(url: str) -> bool:
    """https, or http that does not leave this machine."""
    return is_allowed_url(url, allow_http=True)


def is_loopback(url: str) -> bool:
    try:
        return is_loopback_host(urlsplit(url).hostname or "")
    except ValueError:
        return False


def is_issuer(url: str) -> bool:
    """RFC 8414 §2: no query and no fragment. Nothing that a terminal would take for a command."""
    return is_private(url) and "?" not in url and "#" not in url and is_plain(url)


def is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def said(text: object) -> str:
    """What a server wrote, without signs that a terminal would obey, and not too much of it."""
    shown = "".join(sign if sign.isprintable() else " " for sign in str(text))
    return shown if len(shown) <= 200 else f"{shown[:200]} ..."


def number(found: object) -> float | None:
    """Finite. Some servers write numbers as strings."""
    if not isinstance(found, int | float | str) or isinstance(found, bool):
        return None
    try:
        value = float(found)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None
