"""Tokens that nobody has issued, made of one that somebody has."""

from __future__ import annotations

import base64
import json

_YEAR_S = 365 * 24 * 3600


def forgeries(token: str) -> tuple[str, ...]:
    """Each differs from a good token in one way. Raises ValueError for what is no signed JWT."""
    try:
        header, claims, signature = token.split(".")
        parameters, body, signed = _read(header), _read(claims), _bytes(signature)
    except (ValueError, TypeError) as error:
        raise ValueError("not a signed JWT") from error
    if not (isinstance(parameters, dict) and isinstance(body, dict) and signed):
        raise ValueError("not a signed JWT")
    unsigned = _text({**parameters, "alg": "none"})
    flipped = bytes([signed[0] ^ 1, *signed[1:]])
    later = _text({**body, "exp": int(body.get("exp", 0)) + _YEAR_S})
    other = _text({**body, "sub": "somebody-else"})
    return (
        f"{unsigned}.{claims}.",
        f"{unsigned}.{claims}.{signature}",
        f"{header}.{claims}.",
        f"{header}.{claims}.{_plain(flipped)}",
        f"{header}.{later}.{signature}",
        f"{header}.{other}.{signature}",
        token[: len(token) - len(signature) // 2],
    )


def _bytes(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def _plain(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _read(part: str) -> object:
    return json.loads(_bytes(part))


def _text(content: dict[str, object]) -> str:
    return _plain(json.dumps(content).encode())
