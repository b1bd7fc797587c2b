"""An engine on a TCP port of the loopback interface, certificates for it, and servers that pretend to be engines."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Self

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from scale import SHORT
from server_process import LAUNCHER, START_LIMIT_S, LaunchedServer, free_port

from text_generation_benchmark.process import ServerCommand
from text_generation_common.cluster.identity import Identity, Role
from text_generation_common.cluster.issuing import Authority, Issued

HOST, OTHER_HOST, DEPLOYMENT = "127.0.0.1", "127.0.0.2", "tgi"


class EngineProcess(LaunchedServer):
    """`text-generation-launcher --engine-only`, with the demo model. `address` is where it serves fronts."""

    def __init__(
        self, *arguments: str, launcher: Path = LAUNCHER, environ: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tgi-"))
        self.engine_port, metrics_port = free_port(), free_port()
        self.address = f"{HOST}:{self.engine_port}"
        command = [
            *(str(launcher), "--dtype", "float32", *SHORT.arguments, "--shard-uds-path", str(self._folder / "shard")),
            *("--engine-only", "--engine-address", self.address),
            *("--engine-metrics-port", str(metrics_port), *arguments),
        ]
        super().__init__(
            ServerCommand("the engine", command, metrics_port, "/health", START_LIMIT_S, environ), self._folder / "log"
        )

    def __enter__(self) -> Self:
        """Does not wait until the engine is ready: its fronts may start meanwhile, and then wait for it."""
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class Certificates:
    """A CA, folders with certificates as the command `certs` writes them, and certificates that are wrong."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = Authority.made(DEPLOYMENT)

    @property
    def ca(self) -> bytes:
        return self.authority.issued.certificate

    def issued(self, role: Role, host: str = HOST, days: int = 30, shift_days: int = 0) -> Issued:
        """A certificate that is valid for `days` days, `shift_days` days from now."""
        now = datetime.now(UTC) + timedelta(days=shift_days)
        return self.authority.issue(Identity(DEPLOYMENT, role), host, days, now)

    def of_other_deployment(self, role: Role) -> Issued:
        return self.authority.issue(Identity("other", role), HOST, 30)

    def of_other_ca(self, role: Role) -> Issued:
        return Authority.made(DEPLOYMENT).issue(Identity(DEPLOYMENT, role), HOST, 30)

    def self_signed(self, role: Role) -> Issued:
        """Has all names of the role's certificate, and is signed by its own key."""
        issued = self.issued(role)
        found, key = x509.load_pem_x509_certificate(issued.certificate), load_pem_private_key(issued.key, None)
        builder = x509.CertificateBuilder(
            found.subject, found.subject, found.public_key(), 1, found.not_valid_before_utc, found.not_valid_after_utc
        )
        for extension in found.extensions:
            if not isinstance(extension.value, x509.AuthorityKeyIdentifier):
                builder = builder.add_extension(extension.value, extension.critical)
        assert hasattr(key, "curve")
        return Issued(builder.sign(key, SHA256()).public_bytes(Encoding.PEM), issued.key)

    def folder(self, role: Role, issued: Issued | None = None) -> Path:
        """The folder of `role`, in which certificates are replaced as `certs` replaces them."""
        issued = issued or self.issued(role)
        folder = self._folder / role
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, content in (("ca.crt", self.ca), ("tls.key", issued.key), ("tls.crt", issued.certificate)):
            new = folder / f"{name}.new"
            new.write_bytes(content)
            new.chmod(0o600)
            new.replace(folder / name)
        return folder


@contextmanager
def pretended(issued: Sequence[Issued | None], ca: bytes) -> Iterator[list[str]]:
    """The addresses of ports, each with a gRPC server that shows one of the certificates; None: it speaks no TLS."""
    servers, addresses = [], []
    try:
        for each in issued:
            server = grpc.server(ThreadPoolExecutor(1))
            if each is None:
                port = server.add_insecure_port(f"{HOST}:0")
            else:
                credentials = grpc.ssl_server_credentials([(each.key, each.certificate)], ca, True)
                port = server.add_secure_port(f"{HOST}:0", credentials)
            server.start()
            servers.append(server)
            addresses.append(f"{HOST}:{port}")
        yield addresses
    finally:
        for server in servers:
            server.stop(None)
