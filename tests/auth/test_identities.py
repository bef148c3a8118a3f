"""Callers known without a token, judged by what they show."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from ssl import CERT_REQUIRED, OP_NO_COMPRESSION, OP_NO_TICKET, TLSVersion

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from app.auth.identities.certificates import LiveCertificates, ServerFiles
from app.auth.identities.known import (
    ClientCertificate,
    CompatIdentity,
    Identities,
    IdentityRefused,
    Peer,
    Showing,
    SocketPeer,
    TcpPeer,
    TlsPeer,
    UnixSocket,
)
from app.auth.identities.secret_files import SecretFile, digest_of
from app.domain.errors import UnknownEngine
from app.domain.scopes import Scope
from app.domain.selectors import Selector
from tests.backends.certificates import Authority

NOW = datetime(2026, 11, 30, tzinfo=UTC)
SECRET = "0123456789abcdef0123456789abcdef"
HERE = TcpPeer("127.0.0.1")
NO_FILES = ServerFiles(Path("/c"), Path("/k"), Path("/a"))


class Clock:
    def now(self) -> datetime:
        return NOW


def identities(tmp_path: Path, *more: SecretFile) -> Identities:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    shows: tuple[UnixSocket | SecretFile | ClientCertificate, ...] = (
        UnixSocket(Path("/run/a.sock"), 7),
        SecretFile(file),
        ClientCertificate("h", 1, NO_FILES, frozenset({"t.test", "urn:t"})),
        *more,
    )
    return Identities(
        [
            CompatIdentity(
                name=f"i{number}",
                scopes=frozenset({Scope.READ}),
                engines=Selector(),
                shows=one,
            )
            for number, one in enumerate(shows)
        ],
        Clock(),
    )


def name_of(known: Identities, peer: Peer | None) -> str | None:
    found = known.caller(Showing(peer=peer))
    return None if found is None else found.subject


def test_a_socket_and_a_user(tmp_path: Path) -> None:
    known = identities(tmp_path)
    assert name_of(known, SocketPeer("/run/a.sock", 7)) == "i0"
    for peer in (SocketPeer("/run/a.sock", 0), SocketPeer("/run/b.sock", 7), HERE, None):
        assert name_of(known, peer) is None


def test_a_certificate_by_its_names_at_its_own_listener_until_it_ends(tmp_path: Path) -> None:
    known = identities(tmp_path)
    later = NOW + timedelta(minutes=5)
    assert name_of(known, TlsPeer("i2", frozenset({"x.test", "t.test"}), later)) == "i2"
    assert name_of(known, TlsPeer("i2", frozenset({"urn:t"}), later)) == "i2"
    for peer in (
        TlsPeer("i1", frozenset({"t.test"}), later),
        TlsPeer("i2", frozenset({"*.test", "T.TEST", "x.t.test"}), later),
        TlsPeer("i2", frozenset({"t.test"}), NOW),
    ):
        assert name_of(known, peer) is None, peer
    found = known.caller(Showing(peer=TlsPeer("i2", frozenset({"t.test"}), later)))
    assert found is not None
    assert found.expires_at == later
    found = known.caller(Showing(peer=SocketPeer("/run/a.sock", 7)))
    assert found is not None
    assert found.expires_at == NOW + timedelta(hours=1)


def test_names_are_alternative_names_and_not_the_subject() -> None:
    peer = TlsPeer.of(
        "i2",
        {
            "subject": ((("commonName", "t.test"),),),
            "subjectAltName": (
                *(("DNS", "A.Test"), ("URI", "spiffe://C/t"), ("IP Address", "10.0.0.1")),
                ("email", "t.test"),
            ),
            "notAfter": "Nov 30 00:00:00 2026 GMT",
        },
    )
    assert peer == TlsPeer("i2", frozenset({"a.test", "spiffe://C/t"}), NOW)
    assert TlsPeer.of("i2", {"notAfter": "Nov 30 00:00:00 2026 GMT"}).names == frozenset()


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("fe80::1%eth0", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_a_secret_counts_from_this_machine(tmp_path: Path, address: str, here: bool) -> None:
    known = identities(tmp_path)
    shown = Showing(peer=TcpPeer(address), digest=digest_of(SECRET), direct=True)
    if here:
        found = known.caller(shown)
        assert found is not None
        assert (found.subject, found.client_id) == ("i1", "secret_path")
    else:
        with pytest.raises(UnknownEngine):
            known.caller(shown)


def test_a_secret_is_no_other_and_not_of_two(tmp_path: Path) -> None:
    known = identities(tmp_path)
    for shown in (
        Showing(peer=HERE, digest=digest_of(SECRET[:-1]), direct=True),
        Showing(peer=SocketPeer("/run/a.sock", 7), digest=digest_of(SECRET), direct=True),
        Showing(peer=None, digest=digest_of(SECRET), direct=True),
    ):
        with pytest.raises(UnknownEngine):
            known.refuse_unknown(shown)
    for browser, direct in ((True, True), (False, False)):
        with pytest.raises(IdentityRefused) as refused:
            known.caller(
                Showing(peer=HERE, digest=digest_of(SECRET), browser=browser, direct=direct)
            )
        assert refused.value.identity.name == "i1"
        assert ("browser" in refused.value.message) == browser
    twin = tmp_path / "twin"
    twin.write_text(f"{SECRET}\n")
    known = identities(tmp_path, SecretFile(twin))
    with pytest.raises(UnknownEngine):
        known.caller(Showing(peer=HERE, digest=digest_of(SECRET), direct=True))


# ---- files ----


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "takes 1 to 16 secrets"),
        ("\n".join(f"{SECRET}{n}" for n in range(17)).encode(), "takes 1 to 16 secrets"),
        (SECRET[:31].encode(), "a secret has 32"),
        (SECRET.encode() * 8 + b"x", "a secret has 32"),
        (b"0123456" * 5, "a secret has 32"),
        (f"{SECRET}\n{SECRET[:-1]}~".encode(), "a secret has 32"),
        (f"{SECRET}\u00fc".encode(), "has other signs"),
        (b"\n" * (16 * 1024 - 31) + SECRET.encode(), "takes 1 to 16 secrets"),
    ],
)
def test_secret_files_that_are_none(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=why) as refused:
        SecretFile(file).digests()
    assert SECRET[:10] not in str(refused.value)
    assert not SecretFile(file).has(digest_of(SECRET))


def test_secret_files_as_they_are_now(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        SecretFile(file).digests()
    several = [f"{SECRET}{n}" for n in range(16)]
    for lines in ([SECRET], several, [SECRET * 8], ["01234567" * 4], ["aA_-0123" * 4]):
        file.write_text("\r\n".join(lines))
        assert SecretFile(file).digests() == tuple(map(digest_of, lines))
        assert all(SecretFile(file).has(digest_of(line)) for line in lines)
        assert not SecretFile(file).has(digest_of(f"{lines[0]}x"))
    file.write_bytes(b"\n" * (16 * 1024 - 32) + SECRET.encode())
    assert SecretFile(file).has(digest_of(SECRET))
    file.unlink()
    os.mkfifo(file)
    assert not SecretFile(file).has(digest_of(SECRET)), "and nobody waits for a pipe"


def test_certificates_as_they_last_were_whole(tmp_path: Path) -> None:
    authority, another = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    certificate, key = authority.issue("localhost")
    client_ca = tmp_path / "ca.pem"
    client_ca.write_bytes(authority.path.read_bytes())
    files = ServerFiles(certificate, key, client_ca)
    live = LiveCertificates(files)
    first = live.context
    assert (first.verify_mode, first.minimum_version) == (CERT_REQUIRED, TLSVersion.TLSv1_2)
    assert first.num_tickets == 0
    assert first.options & OP_NO_TICKET
    assert first.options & OP_NO_COMPRESSION
    assert not live.look()
    assert live.context is first
    authority.issue("localhost")
    assert not live.look(), "the same are trusted"
    second = live.context
    assert second is not first
    whole = key.read_bytes()
    asks = load_pem_private_key(whole, None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"nobody types it")
    )
    for text in (another.issue("localhost")[1].read_bytes(), b"", asks, whole):
        key.write_bytes(text)
        assert not live.look()
        assert live.context is second
    for text in (b"", b"\xff", b"-----BEGIN CERTIFICATE-----"):
        client_ca.write_bytes(text)
        assert not live.look()
        assert live.context is second
    client_ca.write_bytes(another.path.read_bytes())
    assert live.look(), "others are trusted now"
    assert live.context is not second
    assert not live.look()
    client_ca.unlink()
    third = live.context
    assert not live.look()
    assert live.context is third
    with pytest.raises(OSError, match=r"ca\.pem"):
        LiveCertificates(files)


ASKING = """
import fcntl, sys, termios
from pathlib import Path
from app.auth.identities.certificates import ServerFiles
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
certificate, key, client_ca = map(Path, sys.argv[1:])
try:
    ServerFiles(certificate, key, client_ca).context(client_ca.read_bytes())
except OSError:
    print("refused")
"""


def test_nobody_at_a_terminal_is_asked_for_a_password(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("localhost")
    locked = BestAvailableEncryption(b"nobody types it")
    plain = load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    with pytest.raises(OSError, match="SSL"):
        ServerFiles(certificate, key, authority.path).context(authority.path.read_bytes())
    ours, terminal = pty.openpty()
    try:
        os.write(ours, b"typed\n")  # for whoever asks, so that nothing waits
        subprocess.run(
            [sys.executable, "-c", ASKING, certificate, key, authority.path],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            check=True,
        )
        said = os.read(ours, 4096).decode().split()
    finally:
        os.close(terminal)
        os.close(ours)
    assert said == ["typed", "refused"]
