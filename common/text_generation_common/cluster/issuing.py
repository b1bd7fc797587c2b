"""A deployment's CA, and the certificates that it issues. Needs the package cryptography (`files.py`).

Keys are ECDSA P-256. Certificates have what RFC 5280 (section 4.2) asks of a CA of depth 0 and of its certificates.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from text_generation_common.cluster.identity import MAX_NAME_CHARACTERS, Identity, deployment_name

CA_DAYS = 3650
# Certificates are valid from this time before they are made, so that machines whose clocks differ accept them.
CLOCK_SKEW = timedelta(hours=1)
_CA_USAGE = {"key_cert_sign", "crl_sign"}
_LEAF_USAGE = {"digital_signature"}
_USAGES = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
_USAGES += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """A deployment's CA."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, deployment: str) -> None:
        self._certificate = certificate
        self._key = key
        self.deployment = deployment

    @classmethod
    def made(cls, deployment: str, now: datetime | None = None, days: int = CA_DAYS) -> "Authority":
        """A new CA that is valid for `days`. ValueError for a name that cannot name a deployment."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"CA of {deployment_name(deployment)}")])
        now = now or datetime.now(UTC)
        uri = x509.UniformResourceIdentifier(f"spiffe://{deployment}")
        builder = _begun(name, name, key, begin=now, end=now + timedelta(days=days), names=[uri])
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(_CA_USAGE), critical=True)
        return cls(builder.sign(key, SHA256()), key, deployment)

    @classmethod
    def read(cls, certificate: bytes, key: bytes) -> "Authority":
        """The CA of `made`, from PEM. ValueError if these are not the certificate and key of such a CA."""
        found, private = x509.load_pem_x509_certificate(certificate), load_pem_private_key(key, password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != found.public_key():
            raise ValueError("the key does not fit the certificate")
        try:
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            [uri] = names.get_values_for_type(x509.UniformResourceIdentifier)
        except (x509.ExtensionNotFound, ValueError):
            raise ValueError("the certificate does not name one deployment") from None
        return cls(found, private, deployment_name(uri.removeprefix("spiffe://")))

    @property
    def issued(self) -> Issued:
        return _issued(self._certificate, self._key)

    @property
    def expires(self) -> datetime:
        return self._certificate.not_valid_after_utc

    def issue(self, identity: Identity, host: str, days: int, now: datetime | None = None) -> Issued:
        """A new key and certificate of `identity` on `host` (`identity.host_name`), valid for `days` but not longer
        than the CA. ValueError for a host whose names are too long."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = now or datetime.now(UTC)
        server_name = identity.server_name(host)
        if len(server_name) > MAX_NAME_CHARACTERS:
            raise ValueError(f"{server_name} has more than {MAX_NAME_CHARACTERS} characters")
        names = [x509.UniformResourceIdentifier(identity.uri), _host(host), x509.DNSName(server_name)]
        common_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{identity.role} of {identity.deployment}")])
        until = min(now + timedelta(days=days), self.expires)
        builder = _begun(common_name, self._certificate.subject, key, begin=now, end=until, names=names)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(_LEAF_USAGE), critical=True)
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(usages, critical=False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(authority, critical=False)
        return _issued(builder.sign(self._key, SHA256()), key)


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    begin: datetime,
    end: datetime,
    names: list[x509.GeneralName],
) -> x509.CertificateBuilder:
    """What a CA's certificate and other certificates have in common."""
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(begin - CLOCK_SKEW).not_valid_after(end)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(allowed: set[str]) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in allowed for usage in _USAGES})


def _issued(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Issued(certificate.public_bytes(Encoding.PEM), pem)
