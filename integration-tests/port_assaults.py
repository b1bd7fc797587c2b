"""What a stranger on the network, and a thief of a certificate, can do to an engine's port."""

import os
import random
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc

from text_generation_proto import engine_pb2 as pb
from text_generation_proto import engine_pb2_grpc as pb_grpc

# The engine ends a connection without a handshake after 5 s. A loaded machine may take longer.
ENDED_LIMIT_S = 60.0
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32)
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)


def ended(address: tuple[str, int], *, sends: bytes, count: int = 1) -> int:
    """Opens `count` connections at a time, sends `sends` on each, and waits. Returns the number of connections that the
    other side has ended."""
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(address, timeout=ENDED_LIMIT_S)) for _ in range(count)]
        for connection in opened:
            with suppress(ConnectionError):
                connection.sendall(sends)
        return sum(map(_is_ended, opened))


def _is_ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def come_and_go(address: tuple[str, int], count: int) -> int:
    """Opens and closes `count` connections, one after the other. Returns the number of connections that were made."""
    made = 0
    for _ in range(count):
        with suppress(OSError), socket.create_connection(address, timeout=ENDED_LIMIT_S):
            made += 1
    return made


def max_connections() -> int:
    """Number of connections that this process can hold, at most 2,000."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    return min(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 256)


def inside_tls(address: tuple[str, int], folder: Path, sends: bytes) -> bool:
    """Shows a valid certificate, and then sends what is not HTTP/2. Whether the connection was ended."""
    with _secure(address, folder) as secure:
        with suppress(OSError):
            secure.sendall(sends)
        with suppress(ssl.SSLError):
            return _is_ended(secure)
        return True


def shown(address: tuple[str, int], folder: Path) -> bytes:
    """The certificate that the server shows to a new connection, in DER form."""
    with _secure(address, folder) as secure:
        return secure.getpeercert(binary_form=True) or b""


@contextmanager
def _secure(address: tuple[str, int], folder: Path) -> Iterator[ssl.SSLSocket]:
    """A connection that shows the certificate in `folder`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(folder / "ca.crt")
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(address, timeout=ENDED_LIMIT_S) as plain, context.wrap_socket(plain) as secure:
        yield secure


def misshapen(channel: grpc.Channel) -> grpc.StatusCode:
    """Begins a front's stream with bytes that are not a message."""
    call = channel.stream_stream("/engine.v1.EngineService/Work", request_serializer=None, response_deserializer=None)
    return _code(lambda: list(call(iter([b"\xff" * 64]), timeout=ENDED_LIMIT_S)))


def oversized(channel: grpc.Channel) -> grpc.StatusCode:
    """Begins a front's stream with a Submit of 64 MiB."""
    message = pb.FrontMessage(submit=pb.Submit(input_ids=bytes(64 * 2**20)))
    return _code(lambda: list(pb_grpc.EngineServiceStub(channel).Work(iter([message]), timeout=ENDED_LIMIT_S)))


def health(channel: grpc.Channel) -> grpc.StatusCode:
    stub = pb_grpc.EngineServiceStub(channel)
    return _code(lambda: stub.Health(pb.HealthRequest(), timeout=ENDED_LIMIT_S))


def _code(call: Callable[[], object]) -> grpc.StatusCode:
    try:
        call()
    except grpc.RpcError as error:
        code = error.code()  # type: ignore[attr-defined]
        assert isinstance(code, grpc.StatusCode)
        return code
    return grpc.StatusCode.OK


def noise(seed: int, size: int = 100_000) -> bytes:
    return random.Random(seed).randbytes(size) if seed else os.urandom(size)
