"""The token of a login, renewed when it is due: by one process for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from app.commands.ending import CommandFailed, Exit, usage
from app.commands.login.asking import AskedAs, Refused, Tokens, tokens
from app.commands.login.keeping import Kept, Logins, Secret
from app.commands.login.metadata import IssuerEndpoints, read_issuer

EARLY_S = 60.0
SECRET_VARIABLE = "CHADBURN_CLIENT_SECRET"  # noqa: S105 - its name


class Bearer:
    """What to show one gateway, however long a command runs. Called anew for each request."""

    def __init__(
        self, logins: Logins, kept: Kept, now: Callable[[], float], variables: Mapping[str, str]
    ) -> None:
        self._logins = logins
        self._kept = kept
        self._now = now
        self._variables = variables

    def __call__(self) -> str:
        """Raises CommandFailed."""
        if not self._is_due(self._kept):
            return self._kept.access_token
        with self._logins.held(self._kept.gateway) as held:
            # Whoever held it before us may have renewed it, or logged out.
            kept = self._logins.read(self._kept.gateway)
            if kept is None:
                raise CommandFailed(Exit.REFUSED, _again(self._kept, "has been logged out"))
            if self._is_due(kept):
                with held.place() as put:
                    kept = self._renewed(kept)
                    put(kept)
            self._kept = kept
        return kept.access_token

    def _is_due(self, kept: Kept) -> bool:
        return self._now() > kept.expires_at - min(EARLY_S, kept.lifetime_s / 10)

    def _renewed(self, kept: Kept) -> Kept:
        try:
            at = read_issuer(kept.issuer)
            return renewed(kept, self._ask(kept, at), self._now())
        except Refused as refused:
            if refused.error != "invalid_grant":
                raise
            line = _again(kept, f"has ended, says {kept.issuer}")
            raise CommandFailed(Exit.REFUSED, line) from refused
        except CommandFailed as failed:
            if failed.exit is Exit.UNREACHABLE and self._now() < kept.expires_at:
                return kept  # good for a little longer; the next one asks again
            raise

    def _ask(self, kept: Kept, at: IssuerEndpoints) -> Tokens:
        if kept.secret is not None:
            who = asked_as(kept, secret_text(kept.secret, self._variables))
            return tokens(at.token, who, "client_credentials", **kept.parameters)
        if kept.refresh_token is None:
            raise CommandFailed(Exit.REFUSED, _again(kept, "has expired"))
        who = asked_as(kept, None)
        # Its scope is that of the login. A resource is named again (RFC 8707 §2.2).
        named = {name: text for name, text in kept.parameters.items() if name != "scope"}
        return tokens(at.token, who, "refresh_token", refresh_token=kept.refresh_token, **named)


def renewed(kept: Kept, found: Tokens, now: float) -> Kept:
    """With new tokens; an issuer that gives no new refresh token means the old one to be kept."""
    return replace(
        kept,
        access_token=found.access_token,
        lifetime_s=found.lifetime_s,
        expires_at=now + found.lifetime_s,
        refresh_token=found.refresh_token or kept.refresh_token,
    )


def asked_as(kept: Kept, secret: str | None) -> AskedAs:
    return AskedAs(client_id=kept.client_id, auth=kept.auth, secret=secret)


def secret_text(secret: Secret, variables: Mapping[str, str]) -> str:
    """Raises CommandFailed."""
    if secret.kind == "kept":
        return secret.value
    if secret.kind == "variable":
        text = variables.get(secret.value, "")
        if not text:
            raise usage(f"the client's secret is to be in {secret.value}, which is not set")
        return text
    try:
        text = Path(secret.value).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise usage(f"the client's secret in {secret.value} can't be read: {why}") from error
    if not text:
        raise usage(f"the client's secret in {secret.value} is empty")
    return text


def _again(kept: Kept, what: str) -> str:
    return f"the login at {kept.gateway} {what}: chadburn login --url {kept.gateway}"
