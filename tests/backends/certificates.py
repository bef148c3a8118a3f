"""A small authority for tests: certificates for names and for clients."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    def __init__(self, folder: Path, name: str = "test authority") -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = folder / "authority.pem"
        self.path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, uri: str | None = None, ended: bool = False) -> tuple[Path, Path]:
        """Certificate and key files. `uri`: instead of the DNS name. `ended`: it is too old."""
        key = ec.generate_private_key(ec.SECP256R1())
        named: x509.GeneralName = x509.DNSName(name)
        if uri is not None:
            named = x509.UniformResourceIdentifier(uri)
        until = datetime.now(UTC) + timedelta(hours=-1 if ended else 1)
        certificate = (
            _builder(_name(name), self._name, key.public_key(), until)
            .add_extension(x509.SubjectAlternativeName([named]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        paths = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    until: datetime | None = None,
) -> x509.CertificateBuilder:
    until = until or datetime.now(UTC) + timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(until - timedelta(minutes=65))
        .not_valid_after(until)
    )
