"""Codes that people type: that of the run, and those that devices show."""

from __future__ import annotations

import base64
import hashlib
import hmac

_PURPOSE = b"chadburn development issuer: code of its pages"


def page_code(secret: str) -> str:
    """What a person types into the issuer's pages, such as ``K7QDM-2XNP4``.

    Made of the run's secret, which it does not give away. Loopback is open to every user of the
    machine, so picking a person takes a secret as everything else here does; 50 bits are more
    than can be tried at a page.
    """
    digest = hmac.new(secret.encode(), _PURPOSE, hashlib.sha256).digest()
    letters = base64.b32encode(digest).decode("ascii")[:10]
    return f"{letters[:5]}-{letters[5:]}"


def is_page_code(typed: str, secret: str) -> bool:
    return hmac.compare_digest(_plain(typed).encode(), _plain(page_code(secret)).encode())


def user_code(typed: str) -> str:
    """A device's code as it was given out, however it was typed (RFC 8628 §6.1)."""
    plain = _plain(typed)
    return f"{plain[:4]}-{plain[4:]}"


def _plain(typed: str) -> str:
    return "".join(sign for sign in typed.upper() if sign.isascii() and sign.isalnum())
