"""An engine and a front in servers of their own, joined by TCP with certificates: strangers are refused, each by one
clear line of the log, and no stream notices them."""

import re
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import port_assaults
import processes
import pytest
import reach
from engine_port import HOST, OTHER_HOST, Certificates, EngineProcess, pretended
from scale import SHORT
from server_process import LAUNCHER, ServerProcess, wait_until
from streams import StreamAnswer, compare

from text_generation_common.cluster.identity import Identity, Role
from text_generation_common.cluster.issuing import Issued

# An engine that is silent for seconds is connected anew, and the tests count connections.
pytestmark = pytest.mark.alone
LOGGED_S = 30.0  # limit for a line to reach the log
CALLS = 4  # number of calls of each client that is refused. A reason is logged once a minute.


@dataclass(frozen=True, slots=True)
class Pair:
    """An engine, and a front that also knows the addresses of pretended engines."""

    certificates: Certificates
    engine: EngineProcess
    front: ServerProcess
    pretended: dict[str, str]  # name of what is wrong → address

    @property
    def at(self) -> tuple[str, int]:
        return HOST, self.engine.engine_port

    def channel(self, issued: Issued | None) -> grpc.Channel:
        """A client that trusts the engine, and shows `issued`."""
        own = (issued.key, issued.certificate) if issued else (None, None)
        credentials = grpc.ssl_channel_credentials(self.certificates.ca, *own)
        name = Identity("tgi", Role.ENGINE).server_name(HOST)
        options = [("grpc.ssl_target_name_override", name), ("grpc.max_send_message_length", -1)]
        return grpc.secure_channel(self.engine.address, credentials, options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    certificates = Certificates(tmp_path_factory.mktemp("tls"))
    tls = lambda role: ("--tls-dir", str(certificates.folder(role)))  # noqa: E731
    wrong = {
        "plain": None,
        "other CA": certificates.of_other_ca(Role.ENGINE),
        "other role": certificates.issued(Role.FRONT),
        "other host": certificates.issued(Role.ENGINE, OTHER_HOST),
        "other deployment": certificates.of_other_deployment(Role.ENGINE),
        "expired": certificates.issued(Role.ENGINE, days=1, shift_days=-2),
        "not yet valid": certificates.issued(Role.ENGINE, shift_days=2),
        "self-signed": certificates.self_signed(Role.ENGINE),
    }
    with pretended(list(wrong.values()), certificates.ca) as addresses, EngineProcess(*tls(Role.ENGINE)) as engine:
        engines = ",".join([*addresses, engine.address])
        with ServerProcess("--dtype", "float32", *SHORT.arguments, "--engines", engines, *tls(Role.FRONT)) as front:
            engine.wait_until_ready()
            yield Pair(certificates, engine, front, dict(zip(wrong, addresses, strict=True)))


def logged(server: EngineProcess | ServerProcess, *words: str) -> list[str]:
    """The lines of the log with all words; waits until there is one."""

    def lines() -> list[str]:
        return [line for line in server.log().splitlines() if all(word in line for word in words)]

    wait_until(lines, LOGGED_S, f"a line with {words}")
    return lines()


def connections(pair: Pair) -> int:
    """Number of connections to the engine, without those after a silence: a busy machine may keep an engine silent."""
    log = pair.front.log()
    return log.count("is connected") - len(re.findall("is lost: (?:silent for|.*ping timeout)", log))


def test_no_port_is_open_but_the_api_s_and_those_that_were_asked_for(pair) -> None:
    assert reach.addresses(pair.front.pid) == {(HOST, pair.front.port)}
    assert reach.addresses(pair.engine.pid) == {pair.at, (HOST, pair.engine.port)}
    assert reach.open_to_others(pair.front.pid) == reach.open_to_others(pair.engine.pid) == []


CLIENTS = {
    "no certificate": (lambda c: None, "shows no certificate"),
    "other CA": (lambda c: c.of_other_ca(Role.FRONT), "unable to get local issuer certificate"),
    "self-signed": (lambda c: c.self_signed(Role.FRONT), "unable to get local issuer certificate"),
    "expired": (lambda c: c.issued(Role.FRONT, days=1, shift_days=-2), "has expired"),
    "not yet valid": (lambda c: c.issued(Role.FRONT, shift_days=2), "is not yet valid"),
    "other role": (lambda c: c.issued(Role.ENGINE), "the peer is spiffe://tgi/engine"),
    "other deployment": (lambda c: c.of_other_deployment(Role.FRONT), "the peer is spiffe://other/front"),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_an_engine_refuses_a_client_and_says_why_once(pair, name) -> None:
    issue, reason = CLIENTS[name]
    issued = issue(pair.certificates)
    expected = grpc.StatusCode.PERMISSION_DENIED if name in ("other role", "other deployment") else None
    for _ in range(CALLS):
        with pair.channel(issued) as channel:
            assert port_assaults.health(channel) is (expected or grpc.StatusCode.UNAVAILABLE)
    lines = logged(pair.engine, "refused", reason)
    assert len(lines) < CALLS and all("WARN" in line for line in lines)


def test_an_engine_refuses_clients_without_tls(pair) -> None:
    with grpc.insecure_channel(pair.engine.address) as channel:
        assert port_assaults.health(channel) is grpc.StatusCode.UNAVAILABLE
    assert port_assaults.ended(pair.at, sends=b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n") == 1
    assert logged(pair.engine, "refused", "does not speak TLS")


ENGINES = {
    "plain": "does not speak TLS",
    "other CA": "unable to get local issuer certificate",
    "other role": "is for another address, role or deployment",
    "other host": "is for another address, role or deployment",
    "other deployment": "is for another address, role or deployment",
    "expired": "has expired",
    "not yet valid": "is not yet valid",
    "self-signed": "unable to get local issuer certificate",
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_front_refuses_an_engine_and_says_why_once(pair, name) -> None:
    [line] = logged(pair.front, f"engine {pair.pretended[name]} cannot be reached", ENGINES[name])
    assert "WARN" in line
    assert f"engine {pair.pretended[name]} is connected" not in pair.front.log()


def test_streams_go_on_beside_assaults_on_the_engine_s_port(pair, one_shard: list[StreamAnswer]) -> None:
    folder = pair.certificates.folder(Role.FRONT)

    def assault() -> None:
        most = port_assaults.max_connections()
        assert port_assaults.come_and_go(pair.at, most) == most
        for seed in (1, 2, 3):
            assert port_assaults.ended(pair.at, sends=port_assaults.noise(seed)) == 1
        assert port_assaults.ended(pair.at, sends=port_assaults.CLIENT_HELLO, count=most) == most
        assert port_assaults.ended((HOST, pair.engine.port), sends=port_assaults.noise(3)) == 1, "the metrics' port"
        assert port_assaults.inside_tls(pair.at, folder, port_assaults.noise(4))
        assert port_assaults.inside_tls(pair.at, folder, port_assaults.HTTP2 + port_assaults.noise(5))
        with pair.channel(pair.certificates.issued(Role.FRONT)) as channel:
            assert port_assaults.misshapen(channel) is not grpc.StatusCode.OK
            assert port_assaults.oversized(channel) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert port_assaults.health(channel) is grpc.StatusCode.OK

    answers, _ = SHORT.beside(pair.front.url, assault, SHORT.num_streams)
    assert compare(one_shard, answers).failures() == []
    assert connections(pair) == 1
    assert pair.engine.log().count("refused") < 50, "the log does not grow with connections"


def test_streams_go_on_while_certificates_are_replaced_and_an_engine_starts_with_them(
    pair, one_shard: list[StreamAnswer]
) -> None:
    """An engine that runs while its certificate is replaced shows the new certificate to new connections."""
    issued = pair.certificates.issued(Role.ENGINE)

    def replace() -> bytes:
        pair.certificates.folder(Role.ENGINE, issued)
        pair.certificates.folder(Role.FRONT)
        shown = port_assaults.shown(pair.at, pair.certificates.folder(Role.FRONT))
        processes.engine(pair.engine.pid).kill()
        return shown

    answers, shown = SHORT.beside(pair.front.url, replace, SHORT.num_streams)
    assert shown == ssl.PEM_cert_to_DER_cert(issued.certificate.decode())
    assert compare(one_shard, answers).failures() == []
    assert connections(pair) == 2


@pytest.mark.parametrize(
    "words",
    [("--engine-only", "--engine-address", "127.0.0.1:0"), ("--engines", "127.0.0.1:1")],
    ids=["engine", "front"],
)
def test_without_certificates_nothing_starts(words, tmp_path: Path) -> None:
    command = [str(LAUNCHER), "--shard-uds-path", str(tmp_path / "s"), "--port", "0", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "needs certificates" in error
    assert "--insecure-cluster" in done.stderr and "Traceback" not in done.stderr + done.stdout


def test_an_insecure_front_says_so_and_cannot_talk_to_an_engine_with_certificates(pair) -> None:
    front = ServerProcess(*SHORT.arguments, "--engines", pair.engine.address, "--insecure-cluster")
    front.start()
    try:
        assert "WARN" in logged(front, "neither encrypted nor authenticated")[0]
        assert logged(front, f"engine {pair.engine.address} cannot be reached")
        assert f"engine {pair.engine.address} is connected" not in front.log()
    finally:
        front.stop()
