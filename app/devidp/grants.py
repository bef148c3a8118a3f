"""What Authlib's grants and endpoints ask of this issuer in particular."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from authlib.oauth2 import OAuth2Error
from authlib.oauth2.rfc6749 import InvalidGrantError, InvalidRequestError, InvalidScopeError
from authlib.oauth2.rfc6749.errors import UnauthorizedClientError
from authlib.oauth2.rfc6749.grants import (
    AuthorizationCodeGrant,
    ClientCredentialsGrant,
    RefreshTokenGrant,
)
from authlib.oauth2.rfc7009 import RevocationEndpoint
from authlib.oauth2.rfc7636 import CodeChallenge
from authlib.oauth2.rfc8628 import DeviceAuthorizationEndpoint, DeviceCodeGrant
from authlib.oauth2.rfc9207 import IssuerParameter
from authlib.oidc.core.grants.code import OpenIDCode
from authlib.oidc.rpinitiated import EndSessionEndpoint
from joserfc.jwk import KeySet

from app.devidp.clients import CREDENTIALS, DEVICE, DevClient
from app.devidp.remembered import Code, DeviceRequest, Login, RefreshToken, keep

if TYPE_CHECKING:
    from app.devidp.authority import Authority

CODE_TTL_S = 60.0
DEVICE_TTL_S = 600
SLOWER_S = 5.0
ANY_CLIENT = ["client_secret_basic", "client_secret_post", "none"]
CONFIDENTIAL = ["client_secret_basic", "client_secret_post"]


class InvalidTarget(OAuth2Error):  # type: ignore[misc]
    """RFC 8707 §2: the client has one audience, and may name no other."""

    error = "invalid_target"


class UnsupportedResponseType(OAuth2Error):  # type: ignore[misc]
    error = "unsupported_response_type"


def check_target(client: DevClient, data: dict[str, str], redirect_uri: str | None = None) -> None:
    """``resource`` (RFC 8707) or ``audience`` may name the client's audience and nothing else."""
    for parameter in ("resource", "audience"):
        if data.get(parameter, client.audience) != client.audience:
            why = f"{client.client_id} may not reach that"
            raise InvalidTarget(why, redirect_uri=redirect_uri)


class _OneAudience:
    """For a token grant: checked once the client is known."""

    request: Any

    def validate_token_request(self) -> None:
        super().validate_token_request()  # type: ignore[misc]
        check_target(self.request.client, self.request.form)


class Credentials(_OneAudience, ClientCredentialsGrant):  # type: ignore[misc]
    GRANT_TYPE = CREDENTIALS
    TOKEN_ENDPOINT_AUTH_METHODS = CONFIDENTIAL


class CodeGrant(_OneAudience, AuthorizationCodeGrant):  # type: ignore[misc]
    TOKEN_ENDPOINT_AUTH_METHODS = ANY_CLIENT
    server: Authority

    @classmethod
    def check_authorization_endpoint(cls, request: Any) -> bool:
        """Whatever is asked for: it is the only grant here that begins at that endpoint."""
        return True

    def validate_authorization_request(self) -> str:
        """The redirect URI. Nothing that was sent is repeated in an error, and nothing goes to an
        address before it is known to be the client's."""
        asked = self.request.payload
        client = self.server.query_client(asked.client_id)
        redirect_uri: str = asked.redirect_uri or ""
        if client is None or not client.check_redirect_uri(redirect_uri):
            raise InvalidRequestError("This client, or its redirect URI, is not known here.")
        if not client.check_response_type(asked.response_type):
            raise UnsupportedResponseType("Only code is served.", redirect_uri=redirect_uri)
        if asked.data.get("code_challenge_method") != "S256" or "code_challenge" not in asked.data:
            why = "PKCE is needed: code_challenge with code_challenge_method S256."
            raise InvalidRequestError(why, redirect_uri=redirect_uri)
        check_target(client, asked.data, redirect_uri)
        super().validate_authorization_request()
        return redirect_uri

    def save_authorization_code(self, code: str, request: Any) -> None:
        login: Login = request.user
        keep(
            self.server.remembered.codes,
            code,
            Code(
                login=login,
                redirect_uri=request.payload.redirect_uri,
                scope=login.person.granted(request.scope),
                nonce=request.payload.data.get("nonce"),
                code_challenge=request.payload.data["code_challenge"],
                code_challenge_method=request.payload.data["code_challenge_method"],
                expires_at=self.server.now_s() + CODE_TTL_S,
            ),
        )

    def query_authorization_code(self, code: str, client: DevClient) -> Code | None:
        found = self.server.remembered.codes.get(code)
        if found is None or found.login.client_id != client.client_id:
            return None
        if found.spent:
            # Shown twice, so two have it: what the first one got ends too (RFC 6749 §4.1.2).
            found.login.ended = True
        good = not found.login.ended and self.server.now_s() < found.expires_at
        return found if good else None

    def delete_authorization_code(self, authorization_code: Code) -> None:
        authorization_code.spent = True

    def authenticate_user(self, authorization_code: Code) -> Login:
        return authorization_code.login


class Proof(CodeChallenge):  # type: ignore[misc]
    """PKCE, S256 alone."""

    SUPPORTED_CODE_CHALLENGE_METHOD = ("S256",)


class Refresh(_OneAudience, RefreshTokenGrant):  # type: ignore[misc]
    TOKEN_ENDPOINT_AUTH_METHODS = ANY_CLIENT
    INCLUDE_NEW_REFRESH_TOKEN = True
    server: Authority

    def authenticate_refresh_token(self, refresh_token: str) -> RefreshToken | None:
        found = self.server.remembered.refresh_tokens.get(refresh_token)
        if found is None:
            return None
        if found.spent:
            # Spent before: either it was stolen, or its thief came first (RFC 9700 §4.14.2).
            found.login.ended = True
        good = not found.login.ended and self.server.now_s() < found.expires_at
        return found if good else None

    def authenticate_user(self, refresh_token: RefreshToken) -> Login:
        return refresh_token.login

    def revoke_old_credential(self, refresh_token: RefreshToken) -> None:
        refresh_token.spent = True


class DeviceGrant(_OneAudience, DeviceCodeGrant):  # type: ignore[misc]
    TOKEN_ENDPOINT_AUTH_METHODS = ANY_CLIENT
    server: Authority

    def query_device_credential(self, device_code: str) -> DeviceRequest:
        found = self.server.remembered.devices.get(device_code)
        if found is None or found.spent:
            raise InvalidGrantError("This device code is not known, or was used before.")
        found.expired = self.server.now_s() >= found.expires_at
        self._asking = found
        return found

    def query_user_grant(self, user_code: str) -> tuple[Login | None, bool] | None:
        """Of the request that is being judged, and not by its code: a code may come again."""
        asking = self._asking
        if asking.waits:
            return None
        asking.spent = True
        return asking.login, not asking.denied

    def should_slow_down(self, credential: DeviceRequest) -> bool:
        now, before = self.server.now_s(), credential.asked_at
        credential.asked_at = now
        if before is None or now - before >= credential.interval_s:
            return False
        credential.interval_s += SLOWER_S
        return True


class DeviceStart(DeviceAuthorizationEndpoint):  # type: ignore[misc]
    CLIENT_AUTH_METHODS = ANY_CLIENT
    EXPIRES_IN = DEVICE_TTL_S
    server: Authority

    @property
    def INTERVAL(self) -> int:  # noqa: N802 - Authlib's name
        return self.server.device_interval_s

    def authenticate_client(self, request: Any) -> DevClient:
        client: DevClient = super().authenticate_client(request)
        if not client.check_grant_type(DEVICE):
            raise UnauthorizedClientError
        check_target(client, request.form)
        if client.get_allowed_scope(request.payload.scope) is None:
            raise InvalidScopeError
        return client

    def get_verification_uri(self) -> str:
        return f"{self.server.issuer.issuer}/device"

    def generate_user_code(self) -> str:
        now = self.server.now_s()
        while True:
            code: str = super().generate_user_code()
            if self.server.remembered.device_of(code, now) is None:
                return code

    def save_device_credential(self, client_id: str, scope: str | None, data: Any) -> None:
        client = self.server.query_client(client_id)
        assert client is not None, "it has just been authenticated"
        keep(
            self.server.remembered.devices,
            data["device_code"],
            DeviceRequest(
                client_id=client_id,
                scope=client.get_allowed_scope(scope) or "",
                user_code=data["user_code"],
                expires_at=self.server.now_s() + DEVICE_TTL_S,
                interval_s=self.server.device_interval_s,
            ),
        )


class Revocation(RevocationEndpoint):  # type: ignore[misc]
    """Of refresh tokens, and all of their login. An access token cannot be called back: whoever
    judges one asks nobody."""

    CLIENT_AUTH_METHODS = ANY_CLIENT
    server: Authority

    def query_token(self, token_string: str, token_type_hint: str | None) -> RefreshToken | None:
        return self.server.remembered.refresh_tokens.get(token_string)

    def revoke_token(self, token: RefreshToken, request: Any) -> None:
        token.login.ended = True


class EndSession(EndSessionEndpoint):  # type: ignore[misc]
    """Ends the login that an ID token tells of. Browsers have no session here to end."""

    server: Authority

    def get_server_jwks(self) -> KeySet:
        return KeySet.import_key_set(self.server.issuer.jwks())  # type: ignore[arg-type]

    def get_algorithms(self) -> list[str]:
        return [self.server.issuer.algorithm]

    def _is_valid_post_logout_redirect_uri(self, client: DevClient, uri: str) -> bool:
        return client.check_post_logout_redirect_uri(uri)

    def end_session(self, asked: Any) -> None:
        sid = (asked.id_token_claims or {}).get("sid")
        login = self.server.remembered.logins.get(sid) if isinstance(sid, str) else None
        if login is not None:
            login.ended = True


class IdToken(OpenIDCode):  # type: ignore[misc]
    """ID tokens by the issuer's clock and key. ``nonce`` is in that of a code alone."""

    def __init__(self, authority: Authority) -> None:
        super().__init__(require_nonce=False)
        self._authority = authority

    def exists_nonce(self, nonce: str, request: Any) -> bool:
        """False: it is for the client to see that each of its own comes once."""
        return False

    def resolve_client_private_key(self, client: DevClient) -> Any:
        return self._authority.issuer.key

    def get_client_algorithm(self, client: DevClient) -> str:
        return self._authority.issuer.algorithm

    def get_encode_header(self, client: DevClient) -> dict[str, Any]:
        issuer = self._authority.issuer
        return {"alg": issuer.algorithm, "kid": issuer.key.kid}

    def get_compatible_claims(self, request: Any) -> dict[str, Any]:
        login: Login = request.user
        now = int(self._authority.now_s())
        return {
            "iss": self._authority.issuer.issuer,
            "aud": request.client.client_id,
            "iat": now,
            "exp": now + self._authority.ttl_s,
            "auth_time": login.at,
            "sid": login.sid,
            "jti": secrets.token_urlsafe(12),
        }

    def generate_user_info(self, user: Login, scope: str) -> dict[str, Any]:
        claims: dict[str, Any] = {"sub": user.person.subject}
        if "profile" in scope.split():
            claims |= {
                "name": user.person.name,
                "preferred_username": user.person.subject,
                "groups": [user.person.group],
            }
        return claims


class NamesItself(IssuerParameter):  # type: ignore[misc]
    """``iss`` in every answer of the authorization endpoint (RFC 9207)."""

    def __init__(self, authority: Authority) -> None:
        self._issuer = authority.issuer.issuer
        super().__call__(authority)

    def get_issuer(self) -> str:
        return self._issuer
