"""A certificate authority for development: makes it once, and certificates for a server and for clients by it."""

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from storage.durable import write_file

AUTHORITY_DAYS = 3650
# Some platforms refuse server certificates that are valid for longer.
CERTIFICATE_DAYS = 825
TRUST_STORE_PASSWORD = "changeit"  # Java's usual one; there is no secret in the file

_SLACK = timedelta(hours=1)  # clocks differ
_ADVICE = """\
  Python      ServiceBusClient.from_connection_string(..., connection_verify="{ca}")
              and the same for ServiceBusAdministrationClient
  JavaScript  NODE_EXTRA_CA_CERTS={ca} node ...
  Java        java -Djavax.net.ssl.trustStore={store} -Djavax.net.ssl.trustStorePassword={password} ...
  Go, .NET    SSL_CERT_FILE={ca}
  curl        curl --cacert {ca} ...
"""


_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_OWN = ("ca", "server", "truststore")  # names of files


class NotAnAuthority(Exception):
    """The directory has files that are no authority of ours. The text is for the user."""


class Authority:
    """The authority in a directory: ca.pem, ca.key, and truststore.p12 for Java."""

    def __init__(self, directory: Path) -> None:
        """Open the authority, and make it if it is not there. Raises NotAnAuthority, OSError."""
        self._directory = directory
        self.certificate_file = directory / "ca.pem"
        self.trust_store = directory / "truststore.p12"
        self._key_file = directory / "ca.key"
        if self._key_file.exists() or self.certificate_file.exists():
            self._read()
        else:
            directory.mkdir(parents=True, exist_ok=True)
            self._make()

    def _read(self) -> None:
        try:
            key = serialization.load_pem_private_key(self._key_file.read_bytes(), None)
            self._certificate = x509.load_pem_x509_certificate(self.certificate_file.read_bytes())
        except (ValueError, TypeError, FileNotFoundError) as error:
            raise NotAnAuthority(
                f"{self._directory}: ca.pem and ca.key are not what this command makes ({error}). "
                "Name another directory, or remove both"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != self._certificate.public_key():
            raise NotAnAuthority(f"{self._directory}: ca.key is not the key of ca.pem. Name another directory")
        self._key = key

    def _make(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Peeklock development authority")])
        usage = _key_usage(key_cert_sign=True, crl_sign=True)
        self._certificate = (
            _builder(name, name, self._key.public_key(), AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        trusted = pkcs12.PKCS12Certificate(self._certificate, b"peeklock")
        password = serialization.BestAvailableEncryption(TRUST_STORE_PASSWORD.encode())
        write_file(self.certificate_file, _pem(self._certificate), mode=0o644)
        write_file(self.trust_store, pkcs12.serialize_java_truststore([trusted], password), mode=0o644)
        write_file(self._key_file, _private_pem(self._key), mode=0o600)

    def issue(self, name: str, hosts: Sequence[str], *, is_server: bool) -> tuple[Path, Path]:
        """Make a certificate for these hosts, in `name`.pem and `name`.key; earlier ones are replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(subject, self._certificate.subject, key.public_key(), CERTIFICATE_DAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
            .add_extension(identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        write_file(files[0], _pem(certificate) + _pem(self._certificate), mode=0o644)
        write_file(files[1], _private_pem(key), mode=0o600)
        return files

    def advice(self) -> str:
        """Return how each SDK is told to trust it."""
        ca, store = (path.absolute() for path in (self.certificate_file, self.trust_store))
        return _ADVICE.format(ca=ca, store=store, password=TRUST_STORE_PASSWORD)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _SLACK,
        not_valid_after=now + timedelta(days=days),
    )


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def is_host(text: str) -> bool:
    """Return True if it is an IP address or a DNS name, whose first label may be *."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.removeprefix("*.").split(".")
        return len(text) <= 253 and all(_LABEL.fullmatch(label) for label in labels)
    return True


def is_client(text: str) -> bool:
    """Return True if it can be the name of a client, and of its files."""
    return is_host(text) and "*" not in text and text.lower() not in _OWN


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
