"""Nodes of a Ray cluster with token and mutual TLS, each on a machine of `machines.py`, or one on this machine.

    with Network(3) as network:
        cluster = RayNodes(folder, network)
        cluster.start_head(0)
        cluster.start_node(1)

The head's state is lost with the head, unless `redis` is given: then it is in Redis."""

import contextlib
import datetime
import ipaddress
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from machines import Machine, Network
from server_process import wait_until

GCS_PORT = 6379
START_LIMIT_S = 120.0
OBJECT_STORE_BYTES = 100_000_000
RAY = Path(sys.executable).with_name("ray")
REDIS_PORT = 6380
REDIS_LIMIT_S = 30.0
WITHOUT_REDIS = "needs redis-server (the package redis-server of Debian)"


def has_redis() -> bool:
    return shutil.which("redis-server") is not None


class Redis:
    """A Redis without files, where the head of a Ray cluster keeps its state. Ends with its machine. `folder` gets its
    settings and its log."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self._machine = machine
        self._folder = folder
        self.address = f"{machine.address}:{REDIS_PORT}"
        self.password = secrets.token_hex(16)

    def start(self) -> None:
        settings = self._folder / "redis.conf"
        settings.touch(mode=0o600)
        lines = [f"bind {self._machine.address}", f"port {REDIS_PORT}", f"requirepass {self.password}", 'save ""']
        settings.write_text("\n".join([*lines, ""]))
        self._machine.start(["redis-server", str(settings)], self._folder / "redis.log")
        wait_until(self._answers, REDIS_LIMIT_S, f"redis-server starts on {self.address}")

    def _answers(self) -> bool:
        try:
            socket.create_connection((self._machine.address, REDIS_PORT), timeout=1.0).close()
        except OSError:
            return False
        return True


class RayNodes:
    """`folder` gets the token, the certificates, and what each node writes. Its path is short: it holds sockets."""

    def __init__(
        self,
        folder: Path,
        network: Network,
        cpus: int = 2,
        head_cpus: int | None = None,
        redis: Redis | None = None,
        count: int | None = None,
    ) -> None:
        """The first `count` machines are nodes; None: all. `cpus`: cores that each node says it has, and `head_cpus`
        those of the head, if it says other ones."""
        self._folder = folder
        self.machines = network.machines[:count]
        self._cpus = cpus
        self._head_cpus = cpus if head_cpus is None else head_cpus
        self._redis = redis
        make_credentials(folder, [network.address, *(machine.address for machine in self.machines)])

    @property
    def address(self) -> str:
        """What `--ray` takes on each machine."""
        return f"{self.machines[0].address}:{GCS_PORT}"

    def environment(self, machine: Machine) -> dict[str, str]:
        """What every process that speaks with Ray on this machine needs."""
        return ray_environment(self._folder) | {"RAY_NODE_IP_ADDRESS": machine.address}

    def start_head(self, number: int = 0) -> None:
        self.joined(number, self.begin(number, is_head=True))

    def start_node(self, number: int) -> None:
        self.joined(number, self.begin(number))

    def begin(
        self, number: int, is_head: bool = False, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Starts the command that starts a node, and ends when it has joined. `environment`: more of it."""
        machine = self.machines[number]
        words = [f"--address={self.address}"]
        more = dict(environment or {})
        if is_head:
            # A head that was killed has left the file, which says that it runs while other nodes know it.
            (self.temporary(number) / "ray_current_cluster").unlink(missing_ok=True)
            words = [*head_words(GCS_PORT)]
            if self._redis is not None:
                words.append(f"--redis-password={self._redis.password}")
                more["RAY_REDIS_ADDRESS"] = self._redis.address
        cpus = self._head_cpus if is_head else self._cpus
        arguments = start_words(self.temporary(number), cpus, *words, f"--node-ip-address={machine.address}")
        return machine.start(arguments, self._log(number), self.environment(machine) | more)

    def joined(self, number: int, starting: "subprocess.Popen[bytes]") -> None:
        """Returns when the node has joined. RuntimeError, with the last lines that it wrote, if it does not."""
        try:
            status = starting.wait(timeout=START_LIMIT_S)
        except subprocess.TimeoutExpired:
            starting.kill()
            status = None
        if status != 0:
            raise RuntimeError(f"node {number} of Ray has not started: {self._log(number).read_text()[-2000:]}")

    def temporary(self, number: int) -> Path:
        """A folder of each node's own, because the machines share /tmp."""
        return self._folder / f"r{number}"

    def raylet(self, number: int) -> psutil.Process | None:
        """The process of a node whose end is the node's."""
        for pid in self.machines[number].pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if is_raylet(process) and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None

    def end(self, number: int) -> None:
        """Kills what is left of a node's own processes, but not what its actors have started."""
        for pid in self.machines[number].pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if str(self.temporary(number)) in " ".join(process.cmdline()):
                    process.kill()

    def _log(self, number: int) -> Path:
        return self._folder / f"ray-{number}.log"


def is_raylet(process: psutil.Process) -> bool:
    return Path((process.cmdline() or [""])[0]).name == "raylet"


@contextlib.contextmanager
def local_ray(folder: Path, cpus: int) -> Iterator[tuple[str, dict[str, str]]]:
    """A cluster of one node on this machine: its address, and the environment of processes that speak with it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # sends nothing: the kernel chooses the address that others see
            host = probe.getsockname()[0]
        except OSError:
            host = "127.0.0.1"
    make_credentials(folder, [host])
    environment = ray_environment(folder)
    try:
        words = (*head_words(port), f"--node-ip-address={host}")
        done = subprocess.run(
            start_words(folder / "r", cpus, *words),
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"Ray has not started: {(done.stdout + done.stderr)[-2000:]}")
        yield f"{host}:{port}", environment
    finally:
        # Not `ray stop`, which ends all clusters of the machine. Actors end with their raylet.
        ours = [process for process in psutil.process_iter(["cmdline"]) if str(folder) in str(process.info["cmdline"])]
        for process in ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(ours, timeout=START_LIMIT_S)


def head_words(port: int) -> tuple[str, ...]:
    return ("--head", f"--port={port}", "--include-dashboard=false", "--disable-usage-stats")


def start_words(folder: Path, cpus: int, *words: str) -> list[str]:
    """The command that starts a node, and returns when it has joined."""
    words += (f"--temp-dir={folder}", f"--num-cpus={cpus}", "--num-gpus=0", "--include-log-monitor=false")
    return [sys.executable, str(RAY), "start", *words, f"--object-store-memory={OBJECT_STORE_BYTES}"]


def ray_environment(folder: Path) -> dict[str, str]:
    """Token, TLS, and a node counted as dead after 9 s of silence."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(folder / "ray.crt"),
        "RAY_TLS_SERVER_KEY": str(folder / "ray.key"),
        "RAY_TLS_CA_CERT": str(folder / "ca.crt"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "3",
        # A node outlives ten minutes without the head.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    }


def make_credentials(folder: Path, addresses: list[str]) -> None:
    """A token; a CA of Ray's own, and one certificate for all nodes. Our own ports take none of these."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Ray of a test")])

    def builder(name: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(ca_name, name, public_key, x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    ca = (
        builder(ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    names = [x509.IPAddress(ipaddress.ip_address(address)) for address in dict.fromkeys([*addresses, "127.0.0.1"])]
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    node = (
        builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")]), key.public_key())
        .add_extension(x509.SubjectAlternativeName([*names, x509.DNSName("localhost")]), critical=False)
        .add_extension(both, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(ca.public_bytes(pem))
    (folder / "ray.crt").write_bytes(node.public_bytes(pem))
    (folder / "ray.key").touch(mode=0o600)
    (folder / "ray.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
