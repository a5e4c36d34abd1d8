"""A certificate authority for tests with own certificates."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class CertificateAuthority:
    """Signs certificates, and writes the files that the settings name."""

    def __init__(self, place: Path, name: str) -> None:
        self._place, self._name = place, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._own = self._signed(self._key.public_key(), name, True)
        (place / f"{name}.pem").write_bytes(self._own.public_bytes(serialization.Encoding.PEM))

    def _signed(self, key: ec.EllipticCurvePublicKey, name: str, is_ca: bool, days: int = 1) -> x509.Certificate:
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * day)
            .not_valid_after(now + days * day)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, name: str, days: int = 1) -> tuple[str, str, str]:
        """Make a certificate that is valid for so many days; returns the paths of it, its key and the CA's."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._place / f"{name}.crt"
        certificate.write_bytes(
            self._signed(key.public_key(), name, False, days).public_bytes(serialization.Encoding.PEM)
        )
        key_file = self._place / f"{name}.key"
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return str(certificate), str(key_file), str(self._place / f"{self._name}.pem")
