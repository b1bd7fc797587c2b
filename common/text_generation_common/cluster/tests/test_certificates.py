"""Certificates that cannot be used are refused in one line, and replaced files are used when they fit."""

import logging
import os
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID

from text_generation_common.cluster import files
from text_generation_common.cluster.certificates import CertificateFolder, host_of, read_certificates
from text_generation_common.cluster.files import require_cryptography, role_folder
from text_generation_common.cluster.identity import Identity, Role
from text_generation_common.cluster.issuing import Authority, Issued
from text_generation_common.errors import CredentialsError

NOW = datetime.now(UTC)
logger = logging.getLogger(__name__)


def refusal(folder: Path, role: Role = Role.ENGINE) -> str:
    with pytest.raises(CredentialsError) as caught:
        read_certificates(folder, role)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_certificates_are_read_with_their_role_and_expiry(deployment):
    found = read_certificates(deployment.folder(Role.ENGINE), Role.ENGINE)
    assert found.identity == Identity("tgi", Role.ENGINE)
    assert timedelta(days=29) < found.expires - datetime.now(UTC) < timedelta(days=30, seconds=2)
    assert b"PRIVATE" in found.key and "PRIVATE" not in repr(found)


def test_a_certificate_lasts_no_longer_than_its_ca(deployment):
    deployment.authority = Authority.made("tgi", days=10)
    assert read_certificates(deployment.folder(Role.FRONT)).expires == deployment.authority.expires


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_each_file_is_needed(deployment, name):
    folder = deployment.folder(Role.ENGINE)
    (folder / name).write_bytes(b"-----BEGIN NOTHING-----\n")
    assert str(folder / name) in refusal(folder)
    (folder / name).unlink()
    assert f"{folder / name} does not exist: make it" in refusal(folder)


@pytest.mark.parametrize(
    ("issued", "reason"),
    [
        (lambda d: d.issued(Role.ENGINE, days=1, now=NOW - timedelta(days=2)), "tls.crt expired at"),
        (lambda d: d.issued(Role.ENGINE, now=NOW + timedelta(days=2)), "set this machine's clock"),
        (lambda d: d.issued(Role.FRONT), "is for the role front, and this program is engine"),
        (lambda d: Authority.made("tgi").issue(Identity("tgi", Role.ENGINE), "x", 1), "not issued by a CA in"),
        (lambda d: Authority.made("tgi").issued, "has no role"),
        (lambda d: Issued(d.issued(Role.ENGINE).certificate, d.issued(Role.ENGINE).key), "tls.key does not fit"),
        (lambda d: _with_password(d.issued(Role.ENGINE)), "tls.key has a password"),
    ],
    ids=["expired", "not yet valid", "other role", "other CA", "a CA", "other key", "password"],
)
def test_a_certificate_that_cannot_be_used_is_refused(deployment, issued: Callable, reason):
    assert reason in refusal(deployment.folder(Role.ENGINE, issued(deployment)))


def _with_password(issued: Issued) -> Issued:
    encryption = serialization.BestAvailableEncryption(b"secret")
    pem = load_key(issued).private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    return Issued(issued.certificate, pem)


def test_an_expired_ca_is_refused(deployment):
    """The certificate's own dates go beyond the CA's, as no CA of ours lets them."""
    old = Authority.made("tgi", now=NOW - timedelta(days=20), days=10)
    issued = signed_again(old, deployment.issued(Role.ENGINE))
    assert "ca.crt expired at" in refusal(deployment.folder(Role.ENGINE, issued, old.issued.certificate))


def signed_again(authority: Authority, issued: Issued, *changed: x509.ExtensionType) -> Issued:
    """The certificate with other extensions in the place of those of the same types, signed by `authority`."""
    found, signer = x509.load_pem_x509_certificate(issued.certificate), load_key(authority.issued)
    issuer = x509.load_pem_x509_certificate(authority.issued.certificate).subject
    builder = x509.CertificateBuilder(
        issuer, found.subject, found.public_key(), 1, found.not_valid_before_utc, found.not_valid_after_utc
    )
    for extension in found.extensions:
        value = next((value for value in changed if value.oid == extension.oid), extension.value)
        builder = builder.add_extension(value, extension.critical)
    return Issued(builder.sign(signer, SHA256()).public_bytes(serialization.Encoding.PEM), issued.key)


def load_key(issued: Issued) -> Any:
    return serialization.load_pem_private_key(issued.key, None)


URI = x509.UniformResourceIdentifier("spiffe://tgi/engine")
SERVER_NAME = x509.DNSName("x.engine.tgi")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (x509.SubjectAlternativeName([URI, SERVER_NAME]), ""),
        (x509.SubjectAlternativeName([URI, x509.DNSName("x")]), r"has no DNS name HOST.engine.tgi"),
        (x509.SubjectAlternativeName([SERVER_NAME]), "it has 0 URIs"),
        (x509.SubjectAlternativeName([URI, URI, SERVER_NAME]), "it has 2 URIs"),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]), ""),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), "not for clients and servers"),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), "not for clients and servers"),
    ],
)
def test_a_certificate_that_the_other_side_would_refuse_is_refused(deployment, changed, reason):
    issued = signed_again(deployment.authority, deployment.issued(Role.ENGINE), changed)
    folder = deployment.folder(Role.ENGINE, issued)
    if reason:
        assert reason in refusal(folder)
    else:
        assert read_certificates(folder, Role.ENGINE)


def test_a_certificate_of_a_form_that_cannot_be_read_is_refused_in_one_line(deployment):
    issued = deployment.issued(Role.ENGINE)
    der = bytearray(ssl.PEM_cert_to_DER_cert(issued.certificate.decode()))
    der[der.index(b"spiffe://") - 2] = 0xA5  # The URI becomes an EDI party name (RFC 5280, section 4.2.1.6).
    broken = Issued(ssl.DER_cert_to_PEM_cert(bytes(der)).encode(), issued.key)
    assert "cannot be read (" in refusal(deployment.folder(Role.ENGINE, broken))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
def test_a_key_that_other_users_can_read_is_refused(deployment, mode):
    folder = deployment.folder(Role.ENGINE)
    (folder / "tls.key").chmod(mode)
    assert f"tls.key is open to other users (mode {mode:o}): run chmod 600" in refusal(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away: run this test as root")
def test_a_key_of_another_user_is_refused(deployment):
    folder = deployment.folder(Role.ENGINE)
    os.chown(folder / "tls.key", 12345, 12345)
    assert "belongs to another user (uid 12345)" in refusal(folder)


def test_intermediate_cas_follow_the_certificate(deployment):
    """The certificate was issued by the second certificate of tls.crt, and only the root is in ca.crt."""
    root, middle = Authority.made("tgi"), Authority.made("tgi")
    own = middle.issue(Identity("tgi", Role.ENGINE), "x", 5)
    chain = Issued(own.certificate + signed_again(root, middle.issued).certificate, own.key)
    assert read_certificates(deployment.folder(Role.ENGINE, chain, root.issued.certificate), Role.ENGINE)
    assert "not issued by a CA" in refusal(deployment.folder(Role.ENGINE, own, root.issued.certificate))


def test_a_certificate_that_is_not_a_ca_issues_no_others(deployment):
    front = deployment.issued(Role.FRONT)
    issuer = Authority(x509.load_pem_x509_certificate(front.certificate), load_key(front), "tgi")
    issued = issuer.issue(Identity("tgi", Role.ENGINE), "x", 5)
    assert "not issued by a CA" in refusal(deployment.folder(Role.ENGINE, issued, front.certificate))
    chain = Issued(issued.certificate + front.certificate, issued.key)
    assert "not issued by a CA" in refusal(deployment.folder(Role.ENGINE, chain))


def test_the_host_of_a_certificate_is_read_again(deployment):
    for host in ("127.0.0.1", "fd00::1", "gpu-1.lan", "*.engines.svc"):
        assert host_of(deployment.folder(Role.ENGINE, deployment.issued(Role.ENGINE, host=host))) == host


def test_replaced_certificates_are_used_from_then_on(deployment):
    folder = CertificateFolder(deployment.folder(Role.ENGINE), Role.ENGINE, logger)
    first = folder.current()
    assert folder.current() is first
    issued = deployment.issued(Role.ENGINE)
    deployment.folder(Role.ENGINE, issued)
    assert folder.current().chain == issued.certificate != first.chain


def test_replaced_certificates_that_cannot_be_used_are_logged_once_and_the_last_stay(deployment, caplog):
    path = deployment.folder(Role.ENGINE)
    folder = CertificateFolder(path, Role.ENGINE, logger)
    first, issued = folder.current(), deployment.issued(Role.ENGINE)
    (path / "tls.key").write_bytes(issued.key)
    assert folder.current() is folder.current() is first
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "does not fit" in warnings[0]
    (path / "tls.crt").write_bytes(issued.certificate)
    assert folder.current().chain == issued.certificate


def test_a_running_process_does_not_change_its_deployment(deployment, caplog):
    path = deployment.folder(Role.ENGINE)
    folder = CertificateFolder(path, Role.ENGINE, logger)
    first, other = folder.current(), Authority.made("other")
    deployment.folder(Role.ENGINE, other.issue(Identity("other", Role.ENGINE), "x", 30), other.issued.certificate)
    assert folder.current() is first and "restart it for another deployment" in caplog.text


def test_a_certificate_that_expires_soon_is_a_warning(deployment, caplog):
    CertificateFolder(deployment.folder(Role.ENGINE, deployment.issued(Role.ENGINE, days=30)), Role.ENGINE, logger)
    assert not caplog.records or all(record.levelno < logging.WARNING for record in caplog.records)
    CertificateFolder(deployment.folder(Role.ENGINE, deployment.issued(Role.ENGINE, days=13)), Role.ENGINE, logger)
    assert "expires at" in caplog.text and caplog.records[-1].levelno == logging.WARNING


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(CredentialsError, match=r"cryptography.*pip install 'tgi-py\[cluster\]'"):
        require_cryptography()


def test_a_ca_is_read_again_from_its_files():
    made = Authority.made("blue")
    assert Authority.read(made.issued.certificate, made.issued.key).deployment == "blue"
    with pytest.raises(ValueError, match="does not fit"):
        Authority.read(made.issued.certificate, Authority.made("blue").issued.key)
    leaf = made.issue(Identity("blue", Role.FRONT), "x", 1)
    with pytest.raises(ValueError):
        Authority.read(leaf.certificate, leaf.key)


# Which certificate of a deployment's tree a process takes.
def make(root: Path, *folders: str) -> None:
    for folder in folders:
        (root / folder).mkdir(parents=True)
        (root / folder / "tls.crt").touch()


def test_the_folder_of_one_certificate_is_taken_as_it_is(tmp_path):
    make(tmp_path, "any")
    assert role_folder(tmp_path / "any", Role.ENGINE, "10.0.0.1") == tmp_path / "any"


@pytest.mark.parametrize(
    ("host", "folder"),
    [("10.0.0.1", "10.0.0.1"), ("fd00::1", "fd00--1"), ("e-0.engines.svc", "_.engines.svc"), ("e.svc", "e.svc")],
)
def test_an_engine_takes_that_of_its_address(tmp_path, host, folder):
    make(tmp_path, *(f"engine/{name}" for name in ("10.0.0.1", "fd00--1", "_.engines.svc", "e.svc")), "front/10.0.0.9")
    assert role_folder(tmp_path, Role.ENGINE, host) == tmp_path / "engine" / folder
    with pytest.raises(CredentialsError, match=r"of the role engine for 10\.0\.0\.9"):
        role_folder(tmp_path, Role.ENGINE, "10.0.0.9")


def test_a_front_takes_that_of_its_machine_s_name_or_the_first(tmp_path, monkeypatch):
    make(tmp_path, "front/a", "front/web")
    monkeypatch.setattr(socket, "gethostname", lambda: "WEB")
    monkeypatch.setattr(socket, "getfqdn", lambda: "web.local")
    assert role_folder(tmp_path, Role.FRONT) == tmp_path / "front/web"
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    assert role_folder(tmp_path, Role.FRONT) == tmp_path / "front/a"
    with pytest.raises(CredentialsError, match="neither"):
        role_folder(tmp_path / "front", Role.FRONT)
