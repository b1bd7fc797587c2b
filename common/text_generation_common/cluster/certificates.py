"""Reads a role's certificates from a folder, checks them, and follows their replacement on disk.

A folder has `ca.crt` (one or more CAs), `tls.crt` (the certificate, then any intermediate CAs) and `tls.key`, all PEM:
the names that cert-manager gives in Kubernetes. Needs the package cryptography (`files.py`).
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from text_generation_common.cluster.files import MAKE, read_file
from text_generation_common.cluster.identity import Identity, Role
from text_generation_common.errors import CredentialsError

CA, CERTIFICATE, KEY = FILES = ("ca.crt", "tls.crt", "tls.key")
# A certificate that expires within this time is logged as a warning when it is loaded.
SOON = timedelta(days=14)
# Roles that other roles connect to.
SERVING = frozenset({Role.ENGINE})
_RENEW = "make it again with `text-generation-launcher certs DIR --renew`"


@dataclass(frozen=True, slots=True)
class Certificates:
    """The checked certificates of one role, as PEM."""

    identity: Identity
    ca: bytes
    chain: bytes
    key: bytes = field(repr=False)
    expires: datetime  # UTC


def read_certificates(folder: Path, role: Role | None = None, now: datetime | None = None) -> Certificates:
    """The certificates in `folder`. CredentialsError, in one line, if a file is missing, is not what its name says, is
    expired, is for another role than `role`, or if the key can be read by other users or does not fit."""
    try:
        return _checked(folder, role, now or datetime.now(UTC))
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        reason = " ".join(str(error).split())
        raise CredentialsError(f"a certificate in {folder} cannot be read ({reason}): {MAKE}") from None


def _checked(folder: Path, role: Role | None, now: datetime) -> Certificates:
    ca, chain, key = (read_file(folder / name, is_key=name == KEY) for name in FILES)
    cas, own = _certificates(ca, folder / CA), _certificates(chain, folder / CERTIFICATE)
    _check_dates(own, folder / CERTIFICATE, now)
    identity = _identity(own[0], folder / CERTIFICATE)
    if role not in (identity.role, None):
        raise CredentialsError(
            f"{folder / CERTIFICATE} is for the role {identity.role}, and this program is {role}: give the folder of"
            f" a certificate for {role}"
        )
    _check_usage(own[0], identity, folder / CERTIFICATE)
    _check_issuer(own, cas, folder, now)
    _check_key(key, own[0], folder)
    return Certificates(identity, ca, chain, key, min(each.not_valid_after_utc for each in own))


def host_of(folder: Path) -> str:
    """The host that a certificate of `issuing.py` was made for. CredentialsError if `folder` has no certificate."""
    path = folder / CERTIFICATE
    names = _names(_certificates(read_file(path, is_key=False), path)[0])
    addresses, hosts = names.get_values_for_type(x509.IPAddress), names.get_values_for_type(x509.DNSName)
    if not addresses and not hosts:
        raise CredentialsError(f"{path} has no host: {MAKE}")
    return str(addresses[0]) if addresses else hosts[0]


class CertificateFolder:
    """The certificates of one role, read again when their files change. Threads may share an object."""

    def __init__(self, path: Path, role: Role, logger: logging.Logger) -> None:
        """CredentialsError as of `read_certificates`."""
        self._path = path
        self._role = role
        self._logger = logger
        self._lock = threading.Lock()
        self._stamp = _stamp(path)
        self._current = read_certificates(path, role)
        self._log_expiry()

    @property
    def identity(self) -> Identity:
        return self._current.identity

    def current(self) -> Certificates:
        """The newest certificates that can be used. Replaced files that cannot be used, such as a key that fits only
        the certificate that is yet to be written, are logged once, and the certificates before them stay in use."""
        with self._lock:
            # The stamp is taken before the files are read, so a change while they are read is noticed the next time.
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._read_again()
            return self._current

    def _read_again(self) -> None:
        try:
            found = read_certificates(self._path, self._role)
            if found.identity != self.identity:
                raise CredentialsError(
                    f"{self._path / CERTIFICATE} is for {found.identity.uri}, and this process is {self.identity.uri}:"
                    " restart it for another deployment"
                )
        except CredentialsError as error:
            self._logger.warning("New certificates are not used, the last ones still are: %s", error)
        else:
            self._current = found
            self._log_expiry()

    def _log_expiry(self) -> None:
        is_soon = self._current.expires - datetime.now(UTC) < SOON
        self._logger.log(
            logging.WARNING if is_soon else logging.INFO,
            "Certificate of %s in %s expires at %s",
            self.identity.uri,
            self._path,
            self._current.expires.isoformat(),
        )


def _stamp(folder: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """A value that changes when a file in `folder` is replaced."""

    def of(path: Path) -> tuple[int, int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    return tuple(of(folder / name) for name in FILES)


def _certificates(pem: bytes, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise CredentialsError(f"{path} has no certificate in PEM form: {MAKE}") from None


def _check_dates(certificates: Sequence[x509.Certificate], path: Path, now: datetime) -> None:
    for each in certificates:
        if each.not_valid_after_utc <= now:
            raise CredentialsError(f"{path} expired at {each.not_valid_after_utc.isoformat()}: {_RENEW}")
        if each.not_valid_before_utc > now:
            begin = each.not_valid_before_utc.isoformat()
            raise CredentialsError(f"{path} is valid from {begin} on: set this machine's clock, which is before that")


def _identity(certificate: x509.Certificate, path: Path) -> Identity:
    uris = _names(certificate).get_values_for_type(x509.UniformResourceIdentifier)
    try:
        if len(uris) != 1:
            raise ValueError(f"it has {len(uris)} URIs, and needs one, spiffe://DEPLOYMENT/ROLE")
        return Identity.from_uri(uris[0])
    except ValueError as error:
        raise CredentialsError(f"{path} has no role: {error}") from None


def _names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return x509.SubjectAlternativeName([])


def _check_usage(certificate: x509.Certificate, identity: Identity, path: Path) -> None:
    """The other side of a connection would refuse the certificate too, but without a reason that it tells."""
    names = _names(certificate).get_values_for_type(x509.DNSName)
    if identity.role in SERVING and not any(name.endswith(identity.server_suffix) for name in names):
        raise CredentialsError(f"{path} has no DNS name HOST{identity.server_suffix}, which fronts ask for: {MAKE}")
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, ValueError):
        return
    if not {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH} <= set(usage):
        raise CredentialsError(f"{path} is not for clients and servers (extended key usage): {MAKE}")


def _check_issuer(
    own: Sequence[x509.Certificate], cas: Sequence[x509.Certificate], folder: Path, now: datetime
) -> None:
    for number, each in enumerate(own):
        for ca in cas:
            if _has_issued(ca, each):
                _check_dates([ca], folder / CA, now)
                return
        if number + 1 < len(own) and not _has_issued(own[number + 1], each):
            break
    raise CredentialsError(f"{folder / CERTIFICATE} was not issued by a CA in {folder / CA}: {MAKE}")


def _has_issued(ca: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
        return ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (InvalidSignature, TypeError, ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound):
        return False


def _check_key(pem: bytes, certificate: x509.Certificate, folder: Path) -> None:
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise CredentialsError(f"{folder / KEY} has a password: give a key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise CredentialsError(f"{folder / KEY} is not a private key in PEM form: {MAKE}") from None
    if key.public_key() != certificate.public_key():
        raise CredentialsError(f"{folder / KEY} does not fit {folder / CERTIFICATE}: {_RENEW}")
