"""Attacks the server as one tenant and serves another: `make attacks` measures every assault and writes the table.

`--before LAUNCHER` also measures the `text-generation-launcher` of an older version, in turns, for the same table."""

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import processes
import victim
from assaults import ASSAULTS, LONG_TEXT, Assault
from calls import DEMO_MODEL
from outcome import Report, table
from server_process import LAUNCHER, ServerProcess

VICTIM_KEY, ATTACKER_KEY = "victim-key", "attacker-key"
NUM_VICTIMS = 60
SETTLE_S = 5.0  # seconds after an assault in which the router returns memory to the system
LIVE_P99_S, LIVE_WORST_S = 0.020, 0.100
MEMORY_MIB = 128
KEPT_MIB = 32  # MiB of memory that may remain taken after SETTLE_S, because allocators keep some memory
SECRET = "4927"


@dataclass(frozen=True, slots=True)
class Attack:
    """The result of one assault. A first-token time is infinite if the victim's request was refused."""

    assault: str
    statuses: dict[str, int]
    alone_p99_s: float
    attacked_p99_s: float
    step_s: float
    live_p99_s: float
    live_worst_s: float
    peak_mib: float  # peak memory of the router and its children during the assault, minus the memory before, in MiB
    kept_mib: float
    restarted: bool

    @property
    def limit_s(self) -> float:
        return 2 * self.alone_p99_s + self.step_s

    def failures(self) -> list[str]:
        found = {
            f"first token {_ms(self.attacked_p99_s)} > {_ms(self.limit_s)}": self.attacked_p99_s > self.limit_s,
            f"/live p99 {_ms(self.live_p99_s)}": self.live_p99_s > LIVE_P99_S,
            f"/live worst {_ms(self.live_worst_s)}": self.live_worst_s > LIVE_WORST_S,
            f"memory +{self.peak_mib:.0f} MiB": self.peak_mib > MEMORY_MIB,
            f"memory kept +{self.kept_mib:.0f} MiB": self.kept_mib > KEPT_MIB,
            "a process was restarted": self.restarted,
        }
        return [text for text, failed in found.items() if failed]


@contextmanager
def served(assault: Assault, launcher: Path) -> Iterator[ServerProcess]:
    """A server with the demo model, two API keys, and the assault's chat template."""
    with tempfile.TemporaryDirectory(prefix="tgi-attacks-") as folder:
        model = str(DEMO_MODEL)
        if assault.chat_template is not None:
            model = str(_with_template(Path(folder) / "model", assault.chat_template))
        keys = ("--api-key", VICTIM_KEY, "--api-key", ATTACKER_KEY)
        with ServerProcess("--model-id", model, *keys, launcher=launcher) as server:
            yield server


def _with_template(folder: Path, template: str) -> Path:
    folder.mkdir()
    for path in DEMO_MODEL.iterdir():
        if path.suffix in (".json", ".safetensors"):
            shutil.copy(path, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


def measure(assault: Assault, launcher: Path, seconds: float) -> Attack:
    with served(assault, launcher) as server:
        return measure_on(server, assault, seconds, NUM_VICTIMS)


def measure_on(server: ServerProcess, assault: Assault, seconds: float, victims: int) -> Attack:
    victim.alone(server.url, VICTIM_KEY, 10)  # warm up
    _one_of_each(server)
    alone = victim.alone(server.url, VICTIM_KEY, victims)
    step_s = victim.step_s(server.url, VICTIM_KEY, _longest_prompt(server))
    before = victim.router_bytes(server)
    pids = processes.serving(server.pid)
    with victim.Watch(server) as watch, _attack(assault, server, seconds + 2.0) as attacker:
        time.sleep(1.0)
        attacked = victim.regularly(server.url, VICTIM_KEY, victims, seconds / victims)
        statuses = _statuses(attacker, seconds)
    time.sleep(SETTLE_S)
    after = victim.router_bytes(server)
    return Attack(
        assault.name,
        statuses,
        victim.percentile(alone, 0.99),
        victim.percentile(attacked, 0.99),
        step_s,
        victim.percentile(watch.live_s, 0.99),
        max(watch.live_s),
        (max(watch.bytes) - before) / victim.MIB,
        (after - before) / victim.MIB,
        processes.serving(server.pid) != pids or not server.is_ready(),
    )


def _one_of_each(server: ServerProcess) -> None:
    """Sends a large body, a chat, and one with a grammar, for which children start. The memory that a server allocates
    for its first such requests would otherwise be counted as the attack's."""
    large = {"inputs": "a", "parameters": {"stop": ["b" * 100_000], "max_new_tokens": 1}}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    bodies = (("/generate", large), *(("/v1/chat/completions", chat | more) for more in ({}, {"guided_regex": "a"})))
    for path, body in bodies:
        _post(server, VICTIM_KEY, path, body)


def _longest_prompt(server: ServerProcess) -> str:
    """A prompt of nearly the longest allowed size: the demo model's tokens have over three characters on average."""
    headers = {"authorization": f"Bearer {VICTIM_KEY}"}
    info = httpx.get(f"{server.url}/info", headers=headers, timeout=victim.PATIENCE_S).json()
    size = 3 * min(info["max_input_tokens"] - 16, info.get("max_batch_prefill_tokens") or 4096)
    return (LONG_TEXT * (size // len(LONG_TEXT) + 1))[:size]


@contextmanager
def _attack(assault: Assault, server: ServerProcess, seconds: float) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, str(Path(__file__).with_name("assailant.py")), assault.name, str(server.port)]
    attacker = subprocess.Popen([*command, str(seconds), ATTACKER_KEY], stdout=subprocess.PIPE, text=True)
    try:
        yield attacker
    finally:
        attacker.kill()
        attacker.communicate()


def _statuses(attacker: "subprocess.Popen[str]", seconds: float) -> dict[str, int]:
    out, _ = attacker.communicate(timeout=seconds + victim.PATIENCE_S)
    if attacker.returncode:
        raise RuntimeError(f"the attacker ended with status {attacker.returncode}")
    counts: dict[str, int] = json.loads(out)
    return counts


def recovered_digits(server: ServerProcess) -> int:
    """Guesses digits of another key's secret from `cached_tokens`, with ten guesses for each digit. Returns the number
    of digits found (D3 of the security review)."""
    prefix = "My PIN code is "
    _cached(server, VICTIM_KEY, f"{prefix}{SECRET}.")
    known = ""
    for _ in SECRET:
        guesses = {digit: _cached(server, ATTACKER_KEY, f"{prefix}{known}{digit} x") for digit in "0123456789"}
        best = max(guesses.values())
        winners = [digit for digit, cached in guesses.items() if cached == best]
        known += winners[0] if len(winners) == 1 else "?"
    return sum(ours == theirs for ours, theirs in zip(known, SECRET, strict=True))


def _cached(server: ServerProcess, key: str, prompt: str) -> int:
    body = {"inputs": prompt, "parameters": {"details": True, "max_new_tokens": 1}}
    return int(_post(server, key, "/generate", body).raise_for_status().json()["details"]["cached_tokens"])


def _post(server: ServerProcess, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=victim.PATIENCE_S)


def _ms(seconds: float) -> str:
    return "refused" if math.isinf(seconds) else f"{seconds * 1000:.0f} ms"


def as_markdown(
    rows: Sequence[tuple[Assault, Sequence[Attack]]], recovered: Sequence[int], labels: Sequence[str]
) -> str:
    """A table with one row for each assault, and the figures of the versions side by side."""
    columns = [f"{figure}, {label}" for label in labels for figure in ("first token p99", "/live p99, worst", "MiB")]
    lines = []
    for assault, outcomes in rows:
        newest = outcomes[-1]
        verdict = "; ".join(newest.failures()) or "held"
        figures = [cell for each in outcomes for cell in _cells(each)]
        lines.append([assault.name, assault.resource, _ms(newest.alone_p99_s), _ms(newest.limit_s), *figures, verdict])
    counts = zip(recovered, labels, strict=True)
    secrets = " and ".join(f"{count} of {len(SECRET)} ({label})" for count, label in counts)
    head = "|".join(["assault", "what it takes", "alone p99", "limit", *columns, " "])
    return f"{table(head, lines)}\n\nDigits of another key's secret that `cached_tokens` gave away: {secrets}."


def _cells(outcome: Attack) -> list[str]:
    live = f"{_ms(outcome.live_p99_s)}, {_ms(outcome.live_worst_s)}"
    return [_ms(outcome.attacked_p99_s), live, f"{outcome.peak_mib:+.0f}, {outcome.kept_mib:+.0f}"]


def main() -> int:
    """Returns 0 if the server withstood every assault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression: only assaults whose names match")
    parser.add_argument("--seconds", type=float, default=24.0, help="seconds that each assault lasts")
    parser.add_argument(
        "--before", type=Path, help="an older text-generation-launcher, measured in turns with this one"
    )
    parser.add_argument("--write", type=Path, help="a Markdown file whose marked table is replaced")
    parser.add_argument("--out", type=Path, help="a JSON Lines file to which each outcome is appended")
    asked = parser.parse_args()
    chosen = [assault for name, assault in ASSAULTS.items() if re.search(asked.only, name)]
    launchers = {"before": asked.before, "now": LAUNCHER} if asked.before else {"now": LAUNCHER}
    rows = []
    for assault in chosen:
        outcomes = []
        for label, launcher in launchers.items():
            outcome = measure(assault, launcher, asked.seconds)
            outcomes.append(outcome)
            print(f"{assault.name}, {label}: {outcome.failures() or 'held'} {outcome.statuses}", flush=True)
            if asked.out:
                with asked.out.open("a") as out:
                    out.write(json.dumps({"label": label} | asdict(outcome)) + "\n")
        rows.append((assault, outcomes))
    recovered = []
    for launcher in launchers.values():
        with served(ASSAULTS["/info"], launcher) as server:
            recovered.append(recovered_digits(server))
    report = Report(asked.write)
    failures = [f"{assault.name}: {failure}" for assault, found in rows for failure in found[-1].failures()]
    report.take("attacks", as_markdown(rows, recovered, list(launchers)), failures)
    return report.status


if __name__ == "__main__":
    raise SystemExit(main())
