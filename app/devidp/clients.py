"""The clients a development issuer knows, and what each may ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from authlib.oauth2.rfc8628 import DEVICE_CODE_GRANT_TYPE

from app.domain.scopes import Scope

CODE = "authorization_code"
CREDENTIALS = "client_credentials"
DEVICE: str = DEVICE_CODE_GRANT_TYPE
REFRESH = "refresh_token"
GRANTS = (CODE, CREDENTIALS, DEVICE, REFRESH)

IDENTITY_SCOPES = frozenset(["openid", "profile", "offline_access"])
"""What a client of a person may ask for beside what it is allowed at its audience."""

_LOOPBACK = re.compile(r"(http://(?:127\.0\.0\.1|\[::1\]))(?::[0-9]{1,5})?(/[^#]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevClient:
    """A client with its one audience and the most it may be granted.

    The methods are those that Authlib's grants ask of a client.
    """

    client_id: str
    name: str = ""
    """For people."""
    audience: str
    scopes: frozenset[str]
    grants: frozenset[str] = frozenset([CREDENTIALS])
    confidential: bool = True
    """Shows the run's secret; else it has none to show."""
    redirect_uris: frozenset[str] = frozenset()
    """Exact, but for the port of a loopback address without one: RFC 8252 §7.3."""
    post_logout_redirect_uris: frozenset[str] = frozenset()

    def get_client_id(self) -> str:
        return self.client_id

    def get_default_redirect_uri(self) -> None:
        """None: every request names its own."""
        return

    def get_allowed_scope(self, scope: str | None) -> str | None:
        """The scope asked for if all of it may be had, or all there is; None refuses."""
        if not scope:
            return " ".join(sorted(self.scopes - IDENTITY_SCOPES))
        return scope if self.scopes.issuperset(scope.split(" ")) else None

    def check_redirect_uri(self, uri: str) -> bool:
        return _among(uri, self.redirect_uris)

    def check_post_logout_redirect_uri(self, uri: str) -> bool:
        return _among(uri, self.post_logout_redirect_uris)

    def check_endpoint_auth_method(self, method: str, _endpoint: str) -> bool:
        return (method != "none") == self.confidential

    def check_response_type(self, response_type: str | None) -> bool:
        return response_type == "code" and CODE in self.grants

    def check_grant_type(self, grant_type: str) -> bool:
        return grant_type in self.grants


def _among(uri: str, known: frozenset[str]) -> bool:
    """As a string, or but for its port where it is a loopback address. The whole is compared, so
    that neither a user name, nor a longer host, nor another path passes."""
    loopback = _LOOPBACK.fullmatch(uri)
    return uri in known or (loopback is not None and "".join(loopback.groups()) in known)


def demo_clients(
    *, admin_audience: str, inference_audience: str, engine_audience: str
) -> tuple[DevClient, ...]:
    """The roles of the demonstration, and the two clients that people log in with.

    ``operator`` may do everything but hand over pickled weights, ``reader`` only look,
    ``inference`` only generate, and ``engine`` is what the gateway itself shows to an engine's
    admin listener. ``chadburn`` is the command line, ``dashboard`` the gateway's own pages.
    """
    everything = frozenset(scope.value for scope in Scope) - {Scope.WEIGHTS_UNSAFE.value}
    return (
        DevClient(client_id="operator", audience=admin_audience, scopes=everything),
        DevClient(client_id="reader", audience=admin_audience, scopes=frozenset([Scope.READ])),
        DevClient(
            client_id="inference",
            audience=inference_audience,
            scopes=frozenset(["inference:generate"]),
        ),
        DevClient(client_id="engine", audience=engine_audience, scopes=everything),
        DevClient(
            client_id="chadburn",
            name="The chadburn command line",
            audience=admin_audience,
            scopes=everything | IDENTITY_SCOPES,
            grants=frozenset([CODE, DEVICE, REFRESH]),
            confidential=False,
            redirect_uris=_on_loopback("/callback"),
        ),
        DevClient(
            client_id="dashboard",
            name="The gateway's dashboard",
            audience=admin_audience,
            scopes=everything | IDENTITY_SCOPES,
            grants=frozenset([CODE, REFRESH]),
            redirect_uris=_on_loopback("/auth/callback"),
            post_logout_redirect_uris=_on_loopback("/"),
        ),
    )


def _on_loopback(path: str) -> frozenset[str]:
    return frozenset([f"http://127.0.0.1{path}", f"http://[::1]{path}"])
