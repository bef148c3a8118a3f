"""One grpc.aio server on one address."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from collections.abc import Sequence
from typing import Any

import grpc

from app.enginekit.settings import TlsFiles

log = logging.getLogger(__name__)


class Listener:
    """Register services on `server`, then `bind`. To be made on the event loop that serves."""

    def __init__(
        self,
        address: str,
        tls: TlsFiles | None,
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        max_message_bytes: int,
    ) -> None:
        self._wanted = address
        self._tls = tls
        self.address = ""
        self.server: Any = grpc.aio.server(
            interceptors=list(interceptors),
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                # A second engine on the same port must be told, not given half of the calls.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ],
        )

    def bind(self) -> None:
        """Raises OSError for an address that is taken or cannot be had, and for files of TLS that
        cannot be read."""
        credentials = None if self._tls is None else _credentials(self._tls)
        socket = self._wanted.startswith("unix:")
        # Whoever may write to a unix socket may try to give orders: only its owner. The mask holds
        # while the socket is made, which a chmod after it would not.
        mask = os.umask(0o177) if socket else None
        try:
            port = self._add_port(credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._wanted}: {_reason(error)}") from error
        finally:
            if mask is not None:
                os.umask(mask)
        host = self._wanted.rpartition(":")[0]
        self.address = self._wanted if socket else f"{host}:{port}"

    def _add_port(self, credentials: grpc.ServerCredentials | None) -> int:
        if credentials is None:
            return int(self.server.add_insecure_port(self._wanted))
        return int(self.server.add_secure_port(self._wanted, credentials))

    async def start(self) -> None:
        await self.server.start()

    async def stop(self, grace_s: float) -> None:
        await self.server.stop(grace_s)
        if self.address.startswith("unix:"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("unix:"))


class _Certificates:
    """Asked at each handshake; files that were replaced count from then on. Raises OSError when
    they cannot be read at first; later the last ones that could go on."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._stamps = self._found()
        self.last = self._read()

    def __call__(self) -> grpc.ServerCertificateConfiguration:
        found = self._found()
        if found == self._stamps:
            return self.last
        try:
            # Between the moments at which the one and the other file are replaced they do not fit.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self._tls.certificate, self._tls.key, lambda: b""
            )
            self.last = self._read()
            self._stamps = found
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            log.warning("replaced files of TLS are not used: %s", type(error).__name__)
        return self.last

    def _found(self) -> list[tuple[int, int, int]]:
        files = (self._tls.certificate, self._tls.key, self._tls.client_ca)
        stats = [file.stat() for file in files if file is not None and file.exists()]
        return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in stats]

    def _read(self) -> grpc.ServerCertificateConfiguration:
        tls = self._tls
        return grpc.ssl_server_certificate_configuration(
            [(tls.key.read_bytes(), tls.certificate.read_bytes())],
            None if tls.client_ca is None else tls.client_ca.read_bytes(),
        )


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    certificates = _Certificates(tls)
    return grpc.dynamic_ssl_server_credentials(
        certificates.last, certificates, require_client_authentication=tls.client_ca is not None
    )


def _reason(error: RuntimeError) -> str:
    """grpc says a paragraph; its end is what went wrong, or how to have that logged."""
    end = str(error).rpartition(";")[2].strip()
    return end if end and "GRPC_VERBOSITY" not in end else "it is in use, or not this machine's"
