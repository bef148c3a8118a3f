"""What the issuer remembers while it runs: who agreed to what, and what came of it.

Everything is lost with the process, refresh tokens too. All of it runs in one thread, and no
decision waits for anything between reading and writing, so that a code or a token is spent once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from app.devidp.clients import DevClient
from app.devidp.people import Person

MOST = 4096
"""Of each kind; the oldest go first."""

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Login:
    """One person's agreement to one client. All tokens that come of it end with it."""

    sid: str
    person: Person
    client_id: str
    at: int
    """Seconds since 1970."""
    ended: bool = False


@dataclass(slots=True, kw_only=True)
class Code:
    """An authorization code; the methods are those that Authlib asks of one."""

    login: Login
    redirect_uri: str
    scope: str
    nonce: str | None
    code_challenge: str
    code_challenge_method: str
    expires_at: float
    spent: bool = False

    def get_redirect_uri(self) -> str:
        return self.redirect_uri

    def get_scope(self) -> str:
        return self.scope

    def get_nonce(self) -> str | None:
        return self.nonce

    def get_auth_time(self) -> int:
        return self.login.at

    def get_acr(self) -> None:
        return

    def get_amr(self) -> None:
        return


@dataclass(slots=True, kw_only=True)
class DeviceRequest:
    """A device that waits for a person; the methods are those that Authlib asks of one."""

    client_id: str
    scope: str
    user_code: str
    expires_at: float
    expired: bool = False
    interval_s: float
    asked_at: float | None = None
    """When it last came to ask."""
    login: Login | None = None
    denied: bool = False
    spent: bool = False

    @property
    def waits(self) -> bool:
        return self.login is None and not self.denied and not self.spent

    def get_client_id(self) -> str:
        return self.client_id

    def get_scope(self) -> str:
        return self.scope

    def get_user_code(self) -> str:
        return self.user_code

    def is_expired(self) -> bool:
        return self.expired


@dataclass(slots=True, kw_only=True)
class RefreshToken:
    """The methods are those that Authlib asks of one."""

    login: Login
    scope: str
    expires_at: float
    spent: bool = False

    def check_client(self, client: DevClient) -> bool:
        return client.client_id == self.login.client_id

    def get_scope(self) -> str:
        return self.scope


@dataclass(slots=True)
class Remembered:
    """Codes, requests and tokens by their own text; logins by ``sid``."""

    logins: dict[str, Login] = field(default_factory=dict)
    codes: dict[str, Code] = field(default_factory=dict)
    devices: dict[str, DeviceRequest] = field(default_factory=dict)
    refresh_tokens: dict[str, RefreshToken] = field(default_factory=dict)

    def device_of(self, user_code: str, now: float) -> DeviceRequest | None:
        """The one that waits under this code."""
        for request in self.devices.values():
            if request.user_code == user_code and request.waits and now < request.expires_at:
                return request
        return None


def keep(kept: dict[str, T], name: str, value: T) -> None:
    while len(kept) >= MOST:
        del kept[next(iter(kept))]
    kept[name] = value
