"""Runs a launcher in its own process. Its children are small scripts that behave like shard, router and download."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import shapes
from text_generation_common.tests.slowness import is_within, slowness
from text_generation_launcher.tests import forked_launchers
from text_generation_launcher.tests.forked_launchers import Launchers

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def slots_of_whole_servers_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of whole servers, in the same process before, may have set this default for their servers."""
    monkeypatch.delenv("MAX_BATCH_TOTAL_TOKENS", raising=False)


# The launcher's program. FAKE_OPEN_FILES=SOFT,HARD sets its limits of open files.
DRIVER = """
import os, resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests to ignore it
if "FAKE_OPEN_FILES" in os.environ:
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, os.environ["FAKE_OPEN_FILES"].split(","))))
from text_generation_launcher.cli import main
main(sys.argv[2:], [Path(sys.argv[1])])
"""

# One script for text-generation-server and text-generation-router. FAKE_DOWNLOAD, FAKE_SHARD and FAKE_ROUTER choose how
# the process misbehaves: a mode, or "NAME=VALUE mode" for processes with this variable in their environment. START is
# the number of the process among all of its role: START=1 is the first router.
PROGRAM = """
import fcntl, json, os, signal, socket, sys, threading, time

def role():
    if sys.argv[0].endswith(("router", "engine")):
        return sys.argv[0].rpartition("-")[2]
    return "download" if sys.argv[1] == "download-weights" else "shard"

def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]

def journal(event, **more):
    entry = {"event": event, "role": role(), "pid": os.getpid(), "argv": sys.argv[1:], "env": dict(os.environ)}
    with open(os.environ["FAKE_JOURNAL"], "a") as file:
        file.write(json.dumps(entry | more) + chr(10))

def events(kind):
    with open(os.environ["FAKE_JOURNAL"]) as file:
        entries = [json.loads(line) for line in file if line.endswith(chr(10))]
    return [entry for entry in entries if entry["event"] == kind]

def starts():
    return sum(entry["role"] == role() for entry in events("start"))

def chosen_mode():
    condition, _, mode = os.environ.get("FAKE_" + role().upper(), "").rpartition(" ")
    name, _, wanted = condition.partition("=")
    return mode if not name or (os.environ | {"START": str(number)}).get(name) == wanted else ""

def log(message, **fields):
    line = {"timestamp": "2026-01-02T03:04:05.678901Z", "level": "INFO", "message": message, "target": "fake." + role()}
    print(json.dumps(line | fields), flush=True)

def end(number, frame):
    journal("stop")
    if mode == "drain":
        while not os.path.exists(os.environ["FAKE_JOURNAL"] + ".drained"):
            time.sleep(0.02)
    os._exit(0)

def wait_for_ever():
    while True:
        time.sleep(60)

def complain(status):
    for number in range(30):
        print(f"complaint {number}", file=sys.stderr, flush=True)
    os._exit(status)

def serve_health():
    address = value("--uds-path") + "-" + os.environ["RANK"]
    if os.path.exists(address):
        os.unlink(address)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    answering = os.environ["FAKE_HEALTH"] + ("/load" if mode == "loads_for_ever" else "/ready")
    threading.Thread(target=relay_all, args=[listener, answering], daemon=True).start()

def relay_all(listener, answering):
    while True:
        client, server = listener.accept()[0], socket.socket(socket.AF_UNIX)
        server.connect(answering)
        for ends in ((client, server), (server, client)):
            threading.Thread(target=relay, args=ends, daemon=True).start()

def relay(source, target):
    try:
        while received := source.recv(65536):
            target.sendall(received)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        target.close()

def answer(server):
    while True:
        server.accept()[0].close()

def talk():
    line = socket.socket(fileno=int(value("--launcher-fd")))
    for text in line.makefile():
        message = json.loads(text)
        if message["event"] == "ping":
            if mode != "deaf":
                say(line, "pong")
            continue
        journal("heard", message=message)
        if message["event"] == "lost" and mode == "blames":
            say(line, "blamed", message["epoch"])
        if message["event"] == "ready":
            if mode == "fail_when_ready":
                complain(3)
            if role() == "router":
                serve(line)
            else:
                say(line, "listening")
            if mode == "confirm":
                say(line, "confirmed", message["epoch"])
            journal("answered", epoch=message["epoch"])
            if mode == "asks" and message["epoch"] == 1:
                say(line, "restart", 7, "an epoch that never was")
                say(line, "restart", 1, "wrong answers")
            if mode == "babbles" and number == 1:
                line.sendall(b"what?" + bytes([10]))

def serve(line):
    server.listen()
    threading.Thread(target=answer, args=[server], daemon=True).start()
    say(line, "listening")  # before the line of the log, for which tests wait
    log("Connected", port=server.getsockname()[1])

served = threading.Event()

def say(line, event, epoch=0, reason=""):
    if event == "listening":
        served.set()
    address = value("--address").replace(":0", ":4711") if role() == "engine" else ""
    fields = {"event": event, "epoch": epoch, "reason": reason, "address": address}
    line.sendall(json.dumps(fields).encode() + bytes([10]))

# Processes that start at once have different numbers, and one whose start is in the journal is ready for a signal.
with open(os.environ["FAKE_JOURNAL"], "a") as locked:
    fcntl.flock(locked, fcntl.LOCK_EX)
    number = starts() + 1
    mode = chosen_mode()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else end)
    journal("start")
if mode in ("fail", "config"):
    complain({"fail": 3, "config": 78}[mode])
if mode == "told":
    print("Error: the disk is full: delete something", file=sys.stderr, flush=True)
    os._exit(78)
if mode == "told_late":  # rank 1 tells its error, of which another rank ends first
    if os.environ["RANK"] == "1":
        print("Error: the disk is full: delete something", file=sys.stderr, flush=True)
        journal("told")
        time.sleep(1)
        os._exit(78)
    while not events("told"):
        time.sleep(0.02)
    os._exit(1)
if mode == "no_memory":
    print("memory allocation of 4096 bytes failed", file=sys.stderr, flush=True)
    os.abort()
if mode == "hang":
    wait_for_ever()
if role() == "download":
    if "FAKE_DOWNLOADED" in os.environ:  # the folder that is in its place only when the download has ended
        os.rename(os.environ["FAKE_DOWNLOADED"] + ".partial", os.environ["FAKE_DOWNLOADED"])
    for received in (25, 50, 100) if mode == "reports" else ():
        log("Download", received_bytes=received, total_bytes=100, bytes_per_s=25, left_s=(100 - received) // 25)
    log("Files are already present on the host. Skipping download.")
    sys.exit(0)
if role() == "shard":
    serve_health()
    with open(value("--uds-path") + "-" + os.environ["TGI_EPOCH"] + ".rendezvous", "w"):
        log("Server started")
else:
    if role() == "router":
        server = socket.socket(fileno=int(value("--listen-fd")))
    print("a plain line", file=sys.stderr, flush=True)
    threading.Thread(target=talk, daemon=True).start()
    if "--engines-by-launcher" in sys.argv or "--engines" in sys.argv:
        serve(socket.socket(fileno=os.dup(int(value("--launcher-fd")))))
if mode == "die_later":
    if role() == "shard":  # once the launcher has what the router says of this shard and of the one before
        while os.environ["TGI_EPOCH"] not in [str(entry["epoch"]) for entry in events("answered")]:
            time.sleep(0.02)
    else:
        served.wait()
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "leave_early":
    time.sleep(0.5)
    sys.exit(0)
wait_for_ever()
"""

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "dtype": "bfloat16",
}  # fmt: skip
TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


def make_model(folder: Path, **changes: object) -> None:
    """Writes a small model of CONFIG whose weights are zeros; `changes` are made in its config.json only."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    write_weights(folder / "model.safetensors", shapes(read_config(folder)))
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def write_weights(file: Path, tensors: dict[str, tuple[int, ...]], kind: str = "BF16", size: int = 2) -> None:
    """A safetensors file of zeros. `kind` is the type of the numbers, `size` the bytes of one."""
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + math.prod(shape) * size
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


class Site:
    """A folder with the programs, a model, the socket prefix and the journal into which the programs write."""

    def __init__(self, root: Path, launchers: Launchers, health: str) -> None:
        self.root = root
        self._launchers = launchers
        self._health = health
        self.programs = root / "bin"
        self.model = root / "model"
        self.uds_path = str(root / "shard")
        self.journal = root / "journal"
        self.runtime_dir = root / "run"
        self.programs.mkdir()
        self.model.mkdir()
        make_model(self.model)
        # Weights in PyTorch's own format, so that a start begins with the child that converts them.
        (self.model / "model.safetensors").rename(self.model / "pytorch_model.bin")
        for name in ("text-generation-server", "text-generation-router", "text-generation-engine"):
            program = self.programs / name
            program.write_text(f"#!{sys.executable} -S\n{PROGRAM}")
            program.chmod(0o755)
        self._launches: list[Launch] = []

    def make_whole(self) -> None:
        """From now on the model's files need no child that converts them."""
        (self.model / "pytorch_model.bin").rename(self.model / "model.safetensors")

    def environ(self, **extra: str) -> dict[str, str]:
        # The fake shards fork no others.
        own = {"FAKE_JOURNAL": str(self.journal), "FAKE_HEALTH": self._health, "TGI_STANDBY": "off"}
        return base_environ() | own | extra

    def launch(self, *flags: str, **extra_environ: str) -> "Launch":
        """Forks a launcher with this site's model and socket prefix, on a port that the kernel chooses; `flags`
        override these."""
        return self._launch("--shard-uds-path", self.uds_path, "-p", "0", *flags, **extra_environ)

    def launch_by_command(self, *flags: str, **extra_environ: str) -> "Launch":
        """The same with an interpreter of its own, so that /proc shows the launcher's command and environment."""
        return self._launch("--shard-uds-path", self.uds_path, "-p", "0", *flags, is_forked=False, **extra_environ)

    def launch_in_runtime_dir(self, *flags: str, **extra_environ: str) -> "Launch":
        """Starts a launcher without --shard-uds-path, as most users do: sockets lie in the runtime directory."""
        self.runtime_dir.mkdir(exist_ok=True)
        return self._launch(*flags, **{"XDG_RUNTIME_DIR": str(self.runtime_dir)} | extra_environ)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs another of the launcher's commands to its end, for the server at this site's socket prefix."""
        launch = self._start([*words, "--shard-uds-path", self.uds_path], {})
        return subprocess.CompletedProcess(words, launch.end(), launch.stdout, launch.stderr)

    def _launch(self, *flags: str, is_forked: bool = True, **extra_environ: str) -> "Launch":
        own = ["--model-id", str(self.model), "--hostname", "127.0.0.1"]
        return self._start([*own, *flags], extra_environ, is_forked)

    def _start(self, words: Sequence[str], extra_environ: Mapping[str, str], is_forked: bool = True) -> "Launch":
        output = self.root / f"output-{len(self._launches)}"
        arguments, environ = [str(self.programs), *words], self.environ(**extra_environ)
        launch = Launch(arguments, environ, output, self._launchers if is_forked else None)
        self._launches.append(launch)
        return launch

    def events(self, kind: str) -> list[dict]:
        lines = self.journal.read_text().splitlines(keepends=True) if self.journal.exists() else []
        # The last line may be incomplete: a process may be writing it.
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        return [entry for entry in entries if entry["event"] == kind]

    def started(self, role: str) -> dict:
        (entry,) = [entry for entry in self.events("start") if entry["role"] == role]
        return entry

    def wait_for_start(self, role: str, number: int = 1) -> dict:
        """The journal's entry for process number `number` of this role. Waits for the process to start."""
        wait_until(lambda: len(self.starts(role)) >= number, f"no {role} in time")
        return self.starts(role)[number - 1]

    def wait_until(self, condition: Callable[[], bool], complaint: str) -> None:
        wait_until(condition, complaint)

    def is_alive(self, pid: int) -> bool:
        return is_alive(pid)

    def starts(self, role: str) -> list[dict]:
        return [entry for entry in self.events("start") if entry["role"] == role]

    def heard(self) -> list[tuple[str, int]]:
        """The messages that the routers have received, as pairs of event and epoch."""
        return [(entry["message"]["event"], entry["message"]["epoch"]) for entry in self.events("heard")]

    def wait_until_heard(self, event: str, epoch: int) -> None:
        wait_until(lambda: (event, epoch) in self.heard(), f"no {event} {epoch} in time")

    def left_behind(self) -> list[str]:
        return [name for name in os.listdir(self.root) if name.startswith("shard")]

    def assert_no_children(self) -> None:
        for entry in self.events("start"):
            wait_until(lambda pid=entry["pid"]: not is_alive(pid), "a child survives its launcher")

    def clean(self) -> None:
        for launch in self._launches:
            launch.process.kill()
            launch.process.wait()
        self.assert_no_children()
        wait_until(lambda: not os.path.exists(f"{self.uds_path}.lock"), "a janitor survives its launcher")
        shutil.rmtree(self.root)


class Launch:
    """`launchers`: fork it; None: it is started by a command."""

    def __init__(
        self, arguments: list[str], environ: dict[str, str], output: Path, launchers: Launchers | None
    ) -> None:
        self._output = output
        with output.open("wb") as stdout, output.with_suffix(".err").open("wb") as stderr:
            if launchers is not None:
                self.process = launchers.fork(DRIVER, arguments, environ, stdout, stderr)
            else:
                command = [sys.executable, "-c", DRIVER, *arguments]
                self.process = subprocess.Popen(command, env=environ, stdout=stdout, stderr=stderr)

    @property
    def stdout(self) -> str:
        return self._output.read_text()

    @property
    def stderr(self) -> str:
        return self._output.with_suffix(".err").read_text()

    def wait_for(self, text: str) -> "Launch":
        wait_until(lambda: text in self.stdout or self.process.poll() is not None, f"no {text!r} in time")
        assert text in self.stdout, self.stdout + self.stderr
        return self

    def ready(self) -> "Launch":
        return self.wait_for("Connected")

    def end(self, number: signal.Signals | None = None) -> int:
        """Sends the signal `number`, if given, and returns the exit status."""
        if number is not None:
            self.process.send_signal(number)
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            return self.process.wait(DEADLINE_S * slowness().clock)


def wait_until(condition, complaint: str) -> None:
    began_s = time.monotonic()
    while not condition():
        assert is_within(time.monotonic() - began_s, DEADLINE_S), complaint
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie. A zombie's parent may never read its exit status."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def base_environ() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(scope="session")
def launchers() -> Iterator[Launchers]:
    with forked_launchers.launchers(base_environ()) as launchers:
        yield launchers


@pytest.fixture(scope="session")
def health() -> Iterator[str]:
    with forked_launchers.health(base_environ()) as folder:
        yield folder


@pytest.fixture
def site(launchers: Launchers, health: str) -> Iterator[Site]:
    # Not pytest's tmp_path, because socket paths must be short.
    site = Site(Path(tempfile.mkdtemp(prefix="launcher-")), launchers, health)
    yield site
    site.clean()


@pytest.fixture(name="make_model")
def make_model_fixture() -> Callable[..., None]:
    return make_model


@pytest.fixture(name="write_weights")
def write_weights_fixture() -> Callable[..., None]:
    return write_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model's folder."""
    model = tmp_path / "model"
    model.mkdir()
    make_model(model)
    return model


@pytest.fixture(scope="session")
def is_listed() -> Callable[[str], bool]:
    """Whether docs/troubleshooting.md has a line for a message. `…` in the page stands for words that differ."""
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    shown = [one or two for cell in cells for two, one in re.findall(r"`` (.+?) ``|`([^`]+)`", cell)]
    patterns = [re.compile(".*".join(map(re.escape, text.split("…")))) for text in shown]
    return lambda message: any(pattern.fullmatch(message) for pattern in patterns)
