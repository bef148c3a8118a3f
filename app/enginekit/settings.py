"""How an engine's administration is served: addresses, credentials, limits. Checked when made."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from app.auth.principal import Principal

DAY_MS = 24 * 60 * 60 * 1000


class Verifier(Protocol):
    """What the kit needs of `app.auth.tokens.verifier.TokenVerifier`. It stays the caller's."""

    async def verify(self, token: str) -> Principal:
        """Raises TokenInvalid, or IssuerUnavailable when the token cannot be judged."""


class SettingsError(ValueError):
    """Settings that must not be started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. With `client_ca` every client has to show a certificate that it signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KitSettings:
    """Raises SettingsError for what is not safe to serve.

    Addresses are `host:port` (port 0: any free one) or `unix:/path`. A listener needs a verifier;
    one without is served only with `insecure_loopback`, on a loopback address or a unix socket.
    """

    data_dir: Path  # holds operations.sqlite3; one engine process at a time
    inference_address: str = "127.0.0.1:0"
    admin_address: str = "127.0.0.1:0"
    vllm_control_address: str | None = None  # `vllm.Control` too; for this machine alone
    inference_verifier: Verifier | None = None  # principals of audience INFERENCE
    admin_verifier: Verifier | None = None  # principals of audience ADMIN
    inference_tls: TlsFiles | None = None
    admin_tls: TlsFiles | None = None
    insecure_loopback: bool = False
    plaintext_beyond_loopback: bool = False
    reflection: bool = False

    default_hold_limit_ms: int = 60_000
    max_hold_limit_ms: int = 600_000
    max_held_requests: int = 1024
    default_deadline_ms: int = 600_000
    max_deadline_ms: int = 3_600_000
    default_lease_ms: int = 60_000  # of a weight session that does not say how long it waits
    key_retention_ms: int = DAY_MS
    operations_kept: int = 10_000
    max_message_bytes: int = 64 * 1024 * 1024

    rollback_timeout_s: float = 30.0  # for all ranks together
    cancel_grace_s: float = 5.0  # how long a cancelled rank may take to let go
    straggler_s: float = 2.0  # how long ranks may still take to commit after one has failed to
    runtime_timeout_s: float = 5.0  # for each read of the runtime
    probe_timeout_s: float = 15.0
    observe_interval_s: float = 1.0  # how soon a lost rank is noticed
    progress_interval_s: float = 0.1  # progress events of an operation are at least this far apart

    def __post_init__(self) -> None:
        if self.key_retention_ms < DAY_MS:
            raise SettingsError("key_retention_ms: keys are kept for 24 hours at least")
        for default, longest in (
            ("default_hold_limit_ms", "max_hold_limit_ms"),
            ("default_deadline_ms", "max_deadline_ms"),
        ):
            if not 0 < getattr(self, default) <= getattr(self, longest):
                raise SettingsError(f"{default}: must be above 0 and at most {longest}")
        at_least_one = ("max_held_requests", "operations_kept", "max_message_bytes")
        for name in (*at_least_one, "default_lease_ms"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}: must be above 0")
        self._check_listener("inference", self.inference_address, self.inference_verifier)
        self._check_listener("admin", self.admin_address, self.admin_verifier)
        if self.vllm_control_address and not is_local_address(self.vllm_control_address):
            raise SettingsError(
                "vllm control listener: that service asks nobody who they are, so it is served on "
                "a loopback address or a unix socket alone"
            )

    def _check_listener(self, name: str, address: str, verifier: Verifier | None) -> None:
        local = is_local_address(address)
        if verifier is None and not (self.insecure_loopback and local):
            raise SettingsError(
                f"{name} listener: without a verifier it is served only with insecure_loopback, "
                "on a loopback address or a unix socket"
            )
        tls = self.inference_tls if name == "inference" else self.admin_tls
        if tls is None and not local and not self.plaintext_beyond_loopback:
            raise SettingsError(
                f"{name} listener: bearer tokens beyond loopback need TLS, "
                "that is a certificate and its key, or plaintext_beyond_loopback"
            )


def is_local_address(address: str) -> bool:
    """Whether only this machine can connect. SettingsError for what is no address."""
    if address.startswith("unix:"):
        if not address.removeprefix("unix:").startswith("/"):
            raise SettingsError("a unix socket is named by an absolute path: unix:/path")
        return True
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError("an address is host:port or unix:/path")
    # A name could resolve to any address later, so only literal ones count as loopback.
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
