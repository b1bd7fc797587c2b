"""Real servers on loopback: which peers are served, and which are refused."""

import asyncio
import logging
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from grpc._cython import cygrpc

from text_generation_common.cluster import security
from text_generation_common.cluster.endpoints import Endpoint, TcpEndpoint, UnixEndpoint, parse_endpoint
from text_generation_common.cluster.identity import Identity, Role
from text_generation_common.cluster.issuing import Authority, Issued
from text_generation_common.cluster.security import (
    PeerRefusedError,
    Security,
    channel_options,
    peer_role,
    server_options,
)
from text_generation_common.errors import AddressInUse, CredentialsError

HOST = "127.0.0.1"
LIMIT = 10_000  # bytes of a message
NOW = datetime.now(UTC)
logger = logging.getLogger(__name__)


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _count(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    yield b"begins"
    async for request in requests:
        yield request


async def _write(request: bytes, context: Any) -> None:
    await context.write(request)


async def _shorten(request: bytes, context: Any) -> bytes:
    return request[:1]


async def _lengthen(request: bytes, context: Any) -> bytes:
    return request * 2


METHODS = {
    "Shorten": grpc.unary_unary_rpc_method_handler(_shorten),
    "Lengthen": grpc.unary_unary_rpc_method_handler(_lengthen),
    "Echo": grpc.unary_unary_rpc_method_handler(_echo),
    "Count": grpc.stream_stream_rpc_method_handler(_count),
    "Write": grpc.unary_stream_rpc_method_handler(_write),
}


@asynccontextmanager
async def serving(secured: Security, endpoint: str = "127.0.0.1:0") -> AsyncIterator[Endpoint]:
    """A server for fronts, at the address that the context gives."""
    server = grpc.aio.server(interceptors=secured.guard({Role.FRONT}), options=server_options(LIMIT))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", METHODS),))
    parsed = parse_endpoint(endpoint, listens=True)
    port = secured.add_port(server, parsed)
    await server.start()
    try:
        yield TcpEndpoint(parsed.host, port) if isinstance(parsed, TcpEndpoint) else parsed
    finally:
        await server.stop(None)


async def outcome(channel: grpc.aio.Channel, content: bytes = b"token", method: str = "Echo") -> grpc.StatusCode:
    """How a call ends: OK only with the answer that it must have."""
    async with channel:
        try:
            if method == "Echo":
                assert await channel.unary_unary("/test/Echo")(content, timeout=10) == content
            elif method == "Count":
                # A write into a call that the server has just ended would hide the code of that end.
                call = channel.stream_stream("/test/Count")(timeout=10)
                if await call.read() != b"begins":
                    return await call.code()
                await call.write(content)
                await call.done_writing()
                assert await call.read() == content and await call.read() is grpc.aio.EOF
            else:
                written = channel.unary_stream(f"/test/{method}")(content, timeout=10)
                assert [answer async for answer in written] == [content]
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def engine(deployment) -> Security:
    return Security(Role.ENGINE, deployment.folder(Role.ENGINE), False, logger)


def front(deployment) -> Security:
    return Security(Role.FRONT, deployment.folder(Role.FRONT), False, logger)


def as_front(deployment) -> Callable[[Endpoint], grpc.aio.Channel]:
    client = front(deployment)
    return lambda endpoint: client.channel(endpoint, Role.ENGINE, LIMIT)


def call(server: Security, connect: Callable[[Endpoint], grpc.aio.Channel], **about: Any) -> grpc.StatusCode:
    async def run() -> grpc.StatusCode:
        async with serving(server) as endpoint:
            return await outcome(connect(endpoint), **about)

    return asyncio.run(run())


def with_certificate(deployment, issued: Issued | None) -> Callable[[Endpoint], grpc.aio.Channel]:
    """A client that trusts and names its server as it should, and shows `issued`, unchecked."""

    def connect(endpoint: Endpoint) -> grpc.aio.Channel:
        own = (issued.key, issued.certificate) if issued else (None, None)
        credentials = grpc.ssl_channel_credentials(deployment.authority.issued.certificate, *own)
        return grpc.aio.secure_channel(endpoint.target, credentials, channel_options(LIMIT))

    return connect


@pytest.mark.parametrize("method", ["Echo", "Count", "Write"])
def test_a_front_of_the_deployment_is_served(deployment, method):
    assert call(engine(deployment), as_front(deployment), method=method) is grpc.StatusCode.OK


def test_tools_that_check_the_host_only_are_served_too(deployment):
    assert call(engine(deployment), with_certificate(deployment, deployment.issued(Role.FRONT))) is grpc.StatusCode.OK


def _self_signed(name: str) -> Issued:
    return Authority.made(name).issued


@pytest.mark.parametrize(
    "issued",
    [
        lambda d: None,
        lambda d: _self_signed("tgi"),
        lambda d: Authority.made("tgi").issue(Identity("tgi", Role.FRONT), "127.0.0.1", 1),
        lambda d: d.issued(Role.FRONT, days=1, now=NOW - timedelta(days=2)),
        lambda d: d.issued(Role.FRONT, now=NOW + timedelta(days=2)),
    ],
    ids=["none", "self-signed", "other CA", "expired", "not yet valid"],
)
def test_a_client_without_a_valid_certificate_is_not_connected(deployment, issued):
    assert call(engine(deployment), with_certificate(deployment, issued(deployment))) is grpc.StatusCode.UNAVAILABLE


def test_a_front_s_key_issues_no_certificates(deployment):
    own = deployment.issued(Role.FRONT)
    key = load_pem_private_key(own.key, None)
    issuer = Authority(x509.load_pem_x509_certificate(own.certificate), key, "tgi")
    issued = issuer.issue(Identity("tgi", Role.FRONT), "127.0.0.1", 1)
    chain = Issued(issued.certificate + own.certificate, issued.key)
    assert call(engine(deployment), with_certificate(deployment, chain)) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("method", ["Echo", "Count", "Write"])
def test_a_valid_certificate_of_another_role_is_refused_by_every_method(deployment, method, caplog):
    server = engine(deployment)
    connect = lambda endpoint: server.channel(endpoint, Role.ENGINE, LIMIT)  # noqa: E731
    assert call(server, connect, method=method) is grpc.StatusCode.PERMISSION_DENIED
    assert "the peer is spiffe://tgi/engine, and this port serves the roles front" in caplog.text


def test_a_front_of_another_deployment_with_the_same_ca_is_refused(deployment):
    other = deployment.authority.issue(Identity("other", Role.FRONT), "127.0.0.1", 1)
    refused = call(engine(deployment), with_certificate(deployment, other))
    assert refused is grpc.StatusCode.PERMISSION_DENIED


def test_a_ca_s_own_certificate_is_not_a_front(deployment):
    refused = call(engine(deployment), with_certificate(deployment, deployment.authority.issued))
    assert refused in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE)


def test_an_unknown_method_is_unimplemented(deployment):
    assert call(engine(deployment), as_front(deployment), method="Missing") is grpc.StatusCode.UNIMPLEMENTED


def test_plaintext_is_refused(deployment):
    assert call(engine(deployment), lambda at: grpc.aio.insecure_channel(at.target)) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("method", "limit_of_front", "most"),
    [("Shorten", 2 * LIMIT, LIMIT), ("Shorten", LIMIT // 2, LIMIT // 2), ("Lengthen", LIMIT // 2, LIMIT // 4)],
    ids=["by the server", "before it is sent", "by the client"],
)
def test_a_message_over_the_limit_is_refused(deployment, method, limit_of_front, most):
    """`most` is the size of the longest message, in bytes, with which the call succeeds."""
    client = front(deployment)

    async def run() -> list[grpc.StatusCode]:
        codes = []
        async with serving(engine(deployment)) as endpoint:
            for size in (most, most + 1):
                async with client.channel(endpoint, Role.ENGINE, limit_of_front) as channel:
                    try:
                        await channel.unary_unary(f"/test/{method}")(b"x" * size, timeout=10)
                        codes.append(grpc.StatusCode.OK)
                    except grpc.aio.AioRpcError as error:
                        codes.append(error.code())
        return codes

    assert asyncio.run(run()) == [grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED]


def test_a_front_that_serves_as_an_engine_is_not_connected(deployment):
    """The certificate is valid for the host and for servers, and has another role."""
    assert call(front(deployment), as_front(deployment)) is grpc.StatusCode.UNAVAILABLE


def test_an_engine_of_another_host_or_deployment_or_ca_is_not_connected(deployment, foreign):
    connect = as_front(deployment)
    elsewhere = deployment.issued(Role.ENGINE, host="127.0.0.2")
    assert call(Security(Role.ENGINE, deployment.folder(Role.ENGINE, elsewhere), False, logger), connect) is (
        grpc.StatusCode.UNAVAILABLE
    )
    other = deployment.authority.issue(Identity("other", Role.ENGINE), "127.0.0.1", 1)
    assert call(Security(Role.ENGINE, deployment.folder(Role.ENGINE, other), False, logger), connect) is (
        grpc.StatusCode.UNAVAILABLE
    )
    assert call(engine(foreign), connect) is grpc.StatusCode.UNAVAILABLE


def test_an_engine_that_was_found_by_a_name_is_asked_for_that_name(deployment):
    wildcard = deployment.issued(Role.ENGINE, host="*.engines.svc")
    server = Security(Role.ENGINE, deployment.folder(Role.ENGINE, wildcard), False, logger)
    client = front(deployment)
    for host, expected in (
        ("engine-0.engines.svc", grpc.StatusCode.OK),
        ("a.b.engines.svc", grpc.StatusCode.UNAVAILABLE),
        (None, grpc.StatusCode.UNAVAILABLE),
    ):
        connect = lambda at, host=host: client.channel(replace(at, name=host), Role.ENGINE, LIMIT)  # noqa: E731
        assert call(server, connect) is expected


def test_a_unix_socket_needs_no_certificate_beside_a_port_that_does(deployment, tmp_path):
    server = engine(deployment)

    async def run() -> grpc.StatusCode:
        async with serving(server, f"unix://{tmp_path}/socket") as endpoint:
            assert isinstance(endpoint, UnixEndpoint)
            return await outcome(front(deployment).channel(endpoint, Role.ENGINE, LIMIT))

    assert asyncio.run(run()) is grpc.StatusCode.OK
    assert server.server_credentials(UnixEndpoint("/x")) is None


def served_certificate(endpoint: TcpEndpoint, folder: Path) -> bytes:
    """The certificate that a server shows to a new connection, in DER form."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(folder / "ca.crt")
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((endpoint.host, endpoint.port)) as plain, context.wrap_socket(plain) as secure:
        return secure.getpeercert(binary_form=True) or b""


def test_replaced_certificates_are_shown_to_new_connections_and_old_connections_stay(deployment):
    server, client = engine(deployment), front(deployment)
    clients = deployment.folder(Role.FRONT)

    async def run() -> None:
        async with serving(server) as endpoint:
            assert isinstance(endpoint, TcpEndpoint)
            channel = client.channel(endpoint, Role.ENGINE, LIMIT)
            stream = channel.stream_stream("/test/Count")(timeout=20)
            assert await stream.read() == b"begins"
            await stream.write(b"before")
            assert await stream.read() == b"before"
            issued = deployment.issued(Role.ENGINE)
            deployment.folder(Role.ENGINE, issued)
            shown = await asyncio.to_thread(served_certificate, endpoint, clients)
            assert shown == ssl.PEM_cert_to_DER_cert(issued.certificate.decode())
            await stream.write(b"after")
            assert await stream.read() == b"after"
            await channel.close()

    asyncio.run(run())


def test_a_ca_is_replaced_while_serving(deployment):
    """Both CAs are trusted first, then each side gets its new certificate, then the old CA goes."""
    old, new = deployment.authority, Authority.made("tgi")
    both = old.issued.certificate + new.issued.certificate
    server, client = engine(deployment), front(deployment)

    def issue(authority: Authority, role: Role, ca: bytes) -> None:
        deployment.folder(role, authority.issue(Identity("tgi", role), "127.0.0.1", 30), ca)

    async def run() -> None:
        async with serving(server) as endpoint:

            async def code() -> grpc.StatusCode:
                return await outcome(client.channel(endpoint, Role.ENGINE, LIMIT))

            issue(old, Role.ENGINE, both)
            issue(old, Role.FRONT, both)
            assert await code() is grpc.StatusCode.OK
            issue(new, Role.ENGINE, both)
            assert await code() is grpc.StatusCode.OK
            issue(new, Role.FRONT, new.issued.certificate)
            issue(new, Role.ENGINE, new.issued.certificate)
            assert await code() is grpc.StatusCode.OK
            left_behind = old.issue(Identity("tgi", Role.FRONT), "127.0.0.1", 30)
            credentials = grpc.ssl_channel_credentials(new.issued.certificate, left_behind.key, left_behind.certificate)
            refused = grpc.aio.secure_channel(endpoint.target, credentials)
            assert await outcome(refused) is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_a_tcp_port_without_certificates_is_refused_before_it_opens():
    bare = Security(Role.ENGINE, None, False, logger)
    for use in (bare.check, bare.server_credentials, bare.channel_credentials):
        with pytest.raises(CredentialsError, match=r"10\.0\.0\.3:50051 needs certificates") as caught:
            use(TcpEndpoint("10.0.0.3", 50051))
        assert "\n" not in str(caught.value)
        use(UnixEndpoint("/run/engine"))


def test_an_insecure_cluster_says_so_at_each_start_and_serves_plaintext(caplog):
    securities = [Security(role, None, True, logger) for role in (Role.ENGINE, Role.FRONT)]
    assert caplog.text.count("neither encrypted nor authenticated") == 2
    server, client = securities
    assert call(server, lambda at: client.channel(at, Role.ENGINE, LIMIT)) is grpc.StatusCode.OK


def test_certificates_and_an_insecure_cluster_exclude_each_other(deployment):
    with pytest.raises(CredentialsError, match="exclude each other"):
        Security(Role.ENGINE, deployment.folder(Role.ENGINE), True, logger)


def test_wrong_certificates_end_a_start(deployment):
    with pytest.raises(CredentialsError, match="is for the role front"):
        Security(Role.ENGINE, deployment.folder(Role.FRONT), False, logger)


def test_a_connection_that_shows_no_certificate_is_ended(deployment, monkeypatch):
    monkeypatch.setattr(security, "HANDSHAKE_MS", 200)

    async def run() -> bytes:
        async with serving(engine(deployment)) as endpoint:
            assert isinstance(endpoint, TcpEndpoint)
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            try:
                return await asyncio.wait_for(reader.read(), 20)  # gRPC's default is 120 s.
            finally:
                writer.close()

    assert asyncio.run(run()) == b""


class Relay:
    """A TCP connection in between, which can stop forwarding without ending."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_frozen = False

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[TcpEndpoint]:
        listener = socket.create_server((HOST, 0))
        accepting = asyncio.create_task(self._accept(listener))
        yield TcpEndpoint(HOST, listener.getsockname()[1])
        for task in (accepting, *self._tasks):
            task.cancel()
        await asyncio.gather(accepting, *self._tasks, return_exceptions=True)
        listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            self._tasks.add(asyncio.create_task(self._connect(connection)))

    async def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection((HOST, self._port))
        server.setblocking(False)
        with client, server, suppress(OSError):
            await asyncio.gather(self._forward(client, server), self._forward(server, client))

    async def _forward(self, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, 65536):
            if self.is_frozen:
                await asyncio.sleep(60)
            await loop.sock_sendall(target, data)


def test_a_peer_that_no_longer_answers_is_lost(deployment, monkeypatch):
    monkeypatch.setattr(security, "PING_AFTER_MS", 200)
    monkeypatch.setattr(security, "PING_ANSWER_MS", 1000)
    client = front(deployment)

    async def run() -> grpc.StatusCode:
        async with serving(engine(deployment)) as endpoint:
            assert isinstance(endpoint, TcpEndpoint)
            relay = Relay(endpoint.port)
            async with relay.listening() as relayed, client.channel(relayed, Role.ENGINE, LIMIT) as channel:
                stream = channel.stream_stream("/test/Count")()
                assert await stream.read() == b"begins"
                await stream.write(b"before")
                assert await stream.read() == b"before"
                relay.is_frozen = True
                return await asyncio.wait_for(stream.code(), 20)  # gRPC's default is a minute.

    assert asyncio.run(run()) is grpc.StatusCode.UNAVAILABLE


def test_grpc_knows_the_name_of_every_option():
    """gRPC ignores other names without a word. One character more, and a server ends streams without messages."""
    library = Path(cygrpc.__file__).read_bytes()
    names = {name for name, _ in server_options(LIMIT) + channel_options(LIMIT)}
    assert [name for name in sorted(names) if name.encode() + b"\0" not in library] == []


def test_without_the_extra_only_certificates_are_refused(deployment):
    script = f"""
import sys, logging, pathlib
sys.modules["cryptography"] = None
from text_generation_common.cluster.security import Security
from text_generation_common.cluster.identity import Role
from text_generation_common.errors import CredentialsError
Security(Role.ENGINE, None, False, logging.getLogger())
try:
    Security(Role.ENGINE, pathlib.Path({str(deployment.folder(Role.ENGINE))!r}), False, logging.getLogger())
except CredentialsError as error:
    print(error)
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'tgi-py[cluster]'") == 1


def test_a_proxy_in_the_environment_is_not_asked(deployment, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert call(engine(deployment), as_front(deployment)) is grpc.StatusCode.OK


def test_a_port_in_use_is_refused_in_one_line(deployment):
    async def run(server: Security) -> None:
        async with serving(server) as endpoint:
            server.add_port(grpc.aio.server(options=server_options(LIMIT)), endpoint)

    with pytest.raises(AddressInUse, match="is in use"):
        asyncio.run(run(engine(deployment)))


class _Context:
    def __init__(self, *uris: bytes) -> None:
        self._uris = uris

    def auth_context(self) -> dict[str, Any]:
        return {"peer_uri": self._uris} if self._uris else {}

    def peer(self) -> str:
        return "ipv4:10.0.0.3:1"


def test_the_role_of_a_peer_is_that_of_its_certificate():
    assert peer_role(_Context(b"spiffe://tgi/front"), "tgi", {Role.FRONT}) is Role.FRONT


@pytest.mark.parametrize(
    "uris",
    [
        (),
        (b"spiffe://tgi/engine",),
        (b"spiffe://other/front",),
        (b"spiffe://tgi/admin",),
        (b"\xff",),
        (b"spiffe://tgi/front", b"spiffe://tgi/engine"),
    ],
)
def test_other_peers_are_refused(uris):
    with pytest.raises(PeerRefusedError):
        peer_role(_Context(*uris), "tgi", {Role.FRONT})
