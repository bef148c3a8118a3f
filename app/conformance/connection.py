"""Where the engine is, what is shown to it, and channels that go there."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM bytes. Without `ca` the machine's own roots are trusted; `name` is the one that the
    certificate has to bear, where that is not the address's."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """`address` is `host:port` or `unix:/path`.

    Raises ValueError for a token that would leave this machine in plaintext.
    """

    address: str
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    def __post_init__(self) -> None:
        if self.token is not None and self.tls is None and not _stays_here(self.address):
            raise ValueError(f"{self.address}: a token goes beyond this machine only over TLS")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return bearer(self.token)

    def channel(self) -> grpc.aio.Channel:
        """A connection of its own: channels to one address share theirs otherwise."""
        options: list[tuple[str, str | int]] = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            # After a restart of the engine the next call must not wait for a long pause to end.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
        ]
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        if self.tls.name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.name))
        credentials = grpc.ssl_channel_credentials(self.tls.ca, self.tls.key, self.tls.certificate)
        return grpc.aio.secure_channel(self.address, credentials, options=options)


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)


def _stays_here(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")
