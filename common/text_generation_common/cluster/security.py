"""Opens gRPC ports and channels: over TCP with certificates, over unix sockets without."""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from text_generation_common.cluster.endpoints import Endpoint, TcpEndpoint, UnixEndpoint
from text_generation_common.cluster.extra import require_cryptography
from text_generation_common.cluster.identity import Identity, Role
from text_generation_common.cluster.peers import PeerGuard
from text_generation_common.errors import AddressInUse, CredentialsError

if TYPE_CHECKING:
    from text_generation_common.cluster.certificates import CertificateFolder

Options = list[tuple[str, int | str]]

# A peer that is silent for PING_AFTER_MS is sent a ping, and is lost if it does not answer within PING_ANSWER_MS, also
# while no call runs. A server refuses clients that ping more often than each LEAST_PING_GAP_MS.
PING_AFTER_MS = 3000
PING_ANSWER_MS = 1500
LEAST_PING_GAP_MS = 1000
# A client that has connected must have shown its certificate within this time.
HANDSHAKE_MS = 5000


def server_options(max_message_bytes: int) -> Options:
    """Options of a server that takes and sends messages of up to `max_message_bytes`."""
    return [
        *_keepalive(),
        *_message_limits(max_message_bytes),
        # gRPC's default is 5 minutes: the connection then ends with "too many pings" at the third ping.
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_GAP_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        # Another process of this user cannot open the same port and take a part of its connections.
        ("grpc.so_reuseport", 0),
    ]


def channel_options(max_message_bytes: int) -> Options:
    """Options of a channel that takes and sends messages of up to `max_message_bytes`."""
    return [
        *_keepalive(),
        *_message_limits(max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),  # Channels to one address do not share connections or waits.
        ("grpc.enable_http_proxy", 0),  # A proxy in the environment is for the internet.
    ]


def _keepalive() -> Options:
    return [
        ("grpc.keepalive_time_ms", PING_AFTER_MS),
        ("grpc.keepalive_timeout_ms", PING_ANSWER_MS),
        # gRPC waits for this one, whose default is a minute, whatever the one above says (measured with grpcio 1.85).
        ("grpc.http2.ping_timeout_ms", PING_ANSWER_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _message_limits(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


class Security:
    """How one process of a deployment protects its ports and its channels to others."""

    def __init__(self, role: Role, tls_dir: Path | None, insecure: bool, logger: logging.Logger) -> None:
        """`tls_dir` is the folder with the certificates of `role` (`certificates.py`). Without it and with `insecure`,
        TCP ports have neither encryption nor authentication, which is logged. CredentialsError, in one line, for
        certificates that cannot be used."""
        self._folder: CertificateFolder | None = None
        self._insecure = insecure
        self._logger = logger
        if tls_dir is not None:
            if insecure:
                raise CredentialsError("certificates and an insecure cluster exclude each other: choose one")
            require_cryptography()
            from text_generation_common.cluster import certificates  # needs tgi-py[cluster]

            self._folder = certificates.CertificateFolder(tls_dir, role, logger)
        elif insecure:
            logger.warning(
                "Insecure cluster: ports between machines are neither encrypted nor authenticated. Every user who can"
                " reach them can read every text and send any"
            )

    @property
    def identity(self) -> Identity | None:
        """What the certificates are for; None without certificates."""
        return None if self._folder is None else self._folder.identity

    def check(self, endpoint: Endpoint) -> None:
        """CredentialsError if `endpoint` needs certificates and `tls_dir` is None. `add_port` and `channel` check it
        too; a start checks all its endpoints first, before a port opens."""
        if isinstance(endpoint, TcpEndpoint) and self._folder is None and not self._insecure:
            raise CredentialsError(
                f"{endpoint.target} needs certificates, because it is not a unix socket: give their folder, or ask for"
                " an insecure cluster"
            )

    def server_credentials(self, endpoint: Endpoint) -> grpc.ServerCredentials | None:
        """What a server on `endpoint` asks of its clients: a certificate of the deployment. None for a port without
        TLS. Certificates replaced on disk are used for each new connection. CredentialsError as of `check`."""
        self.check(endpoint)
        if isinstance(endpoint, UnixEndpoint) or self._folder is None:
            return None
        return _rotating(self._folder)

    def channel_credentials(self, endpoint: Endpoint) -> grpc.ChannelCredentials | None:
        """What a client shows and asks on `endpoint`; None without TLS. The certificates are the newest on disk, and
        stay the credentials' own: a client makes a new channel, with new credentials, whenever it has lost its server.
        CredentialsError as of `check`."""
        self.check(endpoint)
        if isinstance(endpoint, UnixEndpoint) or self._folder is None:
            return None
        found = self._folder.current()
        return grpc.ssl_channel_credentials(found.ca, found.key, found.chain)

    def guard(self, allowed: Collection[Role]) -> list[PeerGuard]:
        """Interceptors for a server that serves the roles `allowed` only; none in an insecure cluster, or where all
        ports are unix sockets."""
        return [] if self.identity is None else [PeerGuard(self.identity.deployment, allowed, self._logger)]

    def add_port(self, server: grpc.aio.Server, endpoint: Endpoint) -> int:
        """Opens `endpoint` and returns its port (1 for a unix socket). CredentialsError as of `check`; AddressInUse if
        the port cannot be opened."""
        credentials = self.server_credentials(endpoint)
        try:
            if credentials is None:
                return server.add_insecure_port(endpoint.target)
            return server.add_secure_port(endpoint.target, credentials)
        except RuntimeError:
            raise AddressInUse(
                f"{endpoint.target} is in use, or not an address of this machine: choose another one"
            ) from None

    def channel(self, endpoint: Endpoint, role: Role, max_message_bytes: int) -> grpc.aio.Channel:
        """A channel to the server of `role` on `endpoint`. The server's certificate must name the role, the deployment
        and the endpoint's host, or the DNS name by which the host was found. CredentialsError as of `check`."""
        credentials, options = self.channel_credentials(endpoint), channel_options(max_message_bytes)
        if credentials is None or self.identity is None or not isinstance(endpoint, TcpEndpoint):
            return grpc.aio.insecure_channel(endpoint.target, options=options)
        name = Identity(self.identity.deployment, role).server_name(endpoint.name or endpoint.host)
        options.append(("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(endpoint.target, credentials, options=options)


def _rotating(folder: "CertificateFolder") -> grpc.ServerCredentials:
    served = folder.current()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(served.key, served.chain)], served.ca)

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC for each new connection, on a thread of its own; None: nothing has changed."""
        nonlocal served
        if (found := folder.current()) is served:
            return None
        served = found
        return configuration()

    # The stubs do not know that `newer` may return None.
    return grpc.dynamic_ssl_server_credentials(configuration(), newer, True)  # type: ignore[arg-type]
