"""Opens gRPC ports and channels: over TCP with certificates, over unix sockets without. An interceptor refuses calls
from roles that a port is not for.
"""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from text_generation_common.cluster.endpoints import Endpoint, TcpEndpoint, UnixEndpoint
from text_generation_common.cluster.files import require_cryptography
from text_generation_common.cluster.identity import Identity, Role
from text_generation_common.errors import AddressInUse, CredentialsError

if TYPE_CHECKING:
    from text_generation_common.cluster.certificates import CertificateFolder
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

# Most different refusals that are logged, so that refused peers cannot fill the log.
MAX_LOGGED = 64
# Kinds of method that a service can have, as gRPC names them.
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


Handler = Any  # a method's `grpc.RpcMethodHandler`; None for a method that does not exist


class PeerRefusedError(Exception):
    """The other side of a call has a certificate that is valid, but not for what it asks."""


class AuthenticatedCall(Protocol):
    """The part of `grpc.aio.ServicerContext` that is used here."""

    def auth_context(self) -> Mapping[str, Any]: ...
    def peer(self) -> str: ...


def peer_role(context: AuthenticatedCall, deployment: str, allowed: Collection[Role]) -> Role:
    """The role in the certificate of a call's client. PeerRefusedError if the client has no certificate, if it is for
    another deployment, or for a role that is not in `allowed`. gRPC has checked CA and dates before."""
    uris = [bytes(uri).decode("utf-8", "replace") for uri in context.auth_context().get("peer_uri", ())]
    try:
        if len(uris) != 1:
            raise ValueError(f"its certificate has {len(uris)} URIs, and needs one")
        identity = Identity.from_uri(uris[0])
    except ValueError as error:
        raise PeerRefusedError(f"the peer has no role: {error}") from None
    if identity.deployment != deployment:
        raise PeerRefusedError(f"the peer is {identity.uri}, and this port is of the deployment {deployment}")
    if identity.role not in allowed:
        roles = ", ".join(sorted(allowed))
        raise PeerRefusedError(f"the peer is {identity.uri}, and this port serves the roles {roles}")
    return identity.role


class PeerGuard(grpc.aio.ServerInterceptor):
    """Refuses each call, of any method, whose client has not one of the allowed roles: PERMISSION_DENIED. Calls over a
    unix socket have no certificate and pass: the rights of the socket's folder decide which users call."""

    def __init__(self, deployment: str, allowed: Collection[Role], logger: logging.Logger) -> None:
        self._deployment = deployment
        self._allowed = frozenset(allowed)
        self._logger = logger
        self._logged: set[str] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler: Handler = await continuation(handler_call_details)
        if handler is None:  # The method does not exist.
            return None
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(self._guarded(getattr(handler, kind)), handler.request_deserializer, handler.response_serializer)

    def _guarded(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        """The behavior of a method, which begins with the check. gRPC tells by a function's kind how it answers."""
        if inspect.isasyncgenfunction(behavior):

            async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
                await self._check(context)
                async for answer in behavior(request, context):
                    yield answer

            return answers

        async def answer(request: Any, context: Any) -> Any:
            await self._check(context)
            return await behavior(request, context)

        return answer

    async def _check(self, context: Any) -> None:
        if context.peer().startswith("unix:"):
            return
        try:
            peer_role(context, self._deployment, self._allowed)
        except PeerRefusedError as error:
            reason = str(error)
            if reason not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(reason)
                self._logger.warning("A call from %s was refused: %s", context.peer(), reason)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)


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
