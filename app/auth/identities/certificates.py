"""What a listener that takes client certificates shows itself, and whom it trusts."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """PEM files. `client_ca`: of the authorities whose certificates callers have to show."""

    certificate: Path
    key: Path
    client_ca: Path

    def contents(self) -> tuple[bytes, ...]:
        """Raises OSError."""
        return tuple(file.read_bytes() for file in (self.certificate, self.key, self.client_ca))

    def context(self, client_ca: bytes) -> ssl.SSLContext:
        """Raises OSError and ValueError for files that make none; ssl.SSLError is an OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=client_ca.decode("ascii"))
        # A password would be asked for at the terminal, and nobody be there.
        context.load_cert_chain(self.certificate, self.key, lambda: b"")
        context.set_alpn_protocols(["http/1.1"])
        # A resumed session would bring a certificate along that nobody looks at again.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        return context


class LiveCertificates:
    """The files as they were when they last were whole. Raises OSError, ValueError at first."""

    def __init__(self, files: ServerFiles) -> None:
        self._files = files
        self._seen = files.contents()
        self.context = files.context(self._seen[2])

    def look(self) -> bool:
        """Take the files anew where they were replaced; True: others are trusted now. Between the
        moments at which certificate and key are replaced, the ones before stay."""
        try:
            found = self._files.contents()
            if found == self._seen:
                return False
            self.context = self._files.context(found[2])
        except (OSError, ValueError) as error:
            log.warning("replaced files of TLS are not used: %s", type(error).__name__)
            return False
        trust_changed = found[2] != self._seen[2]
        self._seen = found
        return trust_changed
