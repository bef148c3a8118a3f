"""The device authorization grant (RFC 8628), as the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from app.auth.tokens.issuers import is_allowed_url
from app.commands.ending import CommandFailed, Exit
from app.commands.login.asking import AskedAs, Refused, Tokens, post, tokens
from app.commands.login.metadata import IssuerEndpoints
from app.commands.login.places import is_plain, number, said

GRANT = "urn:ietf:params:oauth:grant-type:device_code"
INTERVAL_S = 5.0
"""Where the issuer names none, and by how much it grows (RFC 8628 §3.5)."""
LEAST_S = 1.0
MOST_S = 3600.0
_ENDS = {
    "access_denied": "the login was refused",
    "expired_token": "nobody answered in time: try again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What a person needs, and what we ask with. ``direct``: the address with the code in it."""

    user_code: str
    address: str
    direct: str | None
    device_code: str = field(repr=False)
    interval_s: float
    lasts_s: float


def begin(at: IssuerEndpoints, who: AskedAs, parameters: Mapping[str, str]) -> Begun:
    """Raises CommandFailed. What is to be shown is known to be fit for that."""
    if at.device is None:
        line = f"{at.issuer} offers no login for terminals (device authorization grant)"
        raise CommandFailed(Exit.REFUSED, line)
    found = post(at.device, parameters, who)
    user_code, device_code = found.get("user_code"), found.get("device_code")
    # verification_url: a name from before the RFC that is still about.
    address = found.get("verification_uri", found.get("verification_url"))
    direct = found.get("verification_uri_complete")
    for text in (user_code, device_code, address):
        if not isinstance(text, str) or not text:
            raise CommandFailed(Exit.UNREACHABLE, f"{at.device} answered without a code to show")
    for place in (address, direct):
        if place is not None and not _is_page(place, at):
            line = f"{at.issuer} sends people to a page that is not to be trusted"
            raise CommandFailed(Exit.REFUSED, line)
    return Begun(
        user_code=said(user_code),
        address=str(address),
        direct=direct,
        device_code=str(device_code),
        interval_s=_seconds(found.get("interval"), INTERVAL_S, LEAST_S),
        lasts_s=_seconds(found.get("expires_in"), 600.0, 0.0),
    )


def wait(
    at: IssuerEndpoints,
    who: AskedAs,
    begun: Begun,
    *,
    say: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Tokens:
    """Asks until a person has decided; at once as well, so that an issuer which does not know us
    says so before anybody types a code. `say`: told when the issuer is away, and when it is back.
    Raises CommandFailed."""
    ends_at = clock() + begun.lasts_s
    interval_s = begun.interval_s
    away = False
    while True:
        try:
            return tokens(at.token, who, GRANT, device_code=begun.device_code)
        except Refused as refused:
            if away:
                say(f"{at.issuer} answers again; still waiting for you")
            away = False
            if refused.error == "slow_down":
                interval_s += INTERVAL_S
            elif refused.error != "authorization_pending":
                line = _ENDS.get(refused.error)
                if line is None:
                    raise
                raise CommandFailed(Exit.REFUSED, f"{at.issuer}: {line}") from refused
        except CommandFailed as failed:
            # Out of reach for a moment, while the person may still be busy elsewhere.
            if failed.exit is not Exit.UNREACHABLE or clock() > ends_at:
                raise
            if not away:
                say(f"{failed.line}; trying again")
            away = True
            interval_s = min(2 * interval_s, 60.0)
        if clock() > ends_at:
            raise CommandFailed(Exit.REFUSED, f"{at.issuer}: {_ENDS['expired_token']}")
        sleep(interval_s)


def _is_page(place: object, at: IssuerEndpoints) -> bool:
    if not isinstance(place, str) or not is_plain(place):
        return False
    return is_allowed_url(place, allow_http=at.on_loopback)


def _seconds(found: object, otherwise: float, least: float) -> float:
    known = number(found)
    return min(max(otherwise if known is None else known, least), MOST_S)
