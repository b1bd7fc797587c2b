"""Runs what is left of the check, within LIMIT_S seconds, and writes the results files. Call it again until nothing is
left. A journal in .gpu-check/ has what is done, by GPU and by the sources: another version begins anew.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch

from gpu_check.plugin import LATER, read
from gpu_check.report import TARGETS, as_markdown, figures_of, verdict

ROOT = Path(__file__).parents[2]
JOURNALS = ROOT / ".gpu-check"
CHECKS, TABLE = "tools/gpu_check/checks", "server/text_generation_server/kernels/tests"
LIMIT_S = 540  # a lent GPU's calls end after 600 seconds, and starting takes some of them
END_S = 30  # these seconds are left for pytest's end and for the results
GPU = torch.cuda.is_available()
PATIENCE = 1 if GPU else 10  # a rehearsal on a CPU may run beside much other work
# Triton's kernels; without a GPU a few of them.
TABLE_KEYWORD = "triton" if GPU else "triton and (silu_mul_takes or embed_picks or norm_of_a_sum)"
# Paths, workers and keyword. What measures time runs alone; compiling takes most of the table's time.
SUITES = (
    ([f"{CHECKS}/test_{name}.py" for name in ("steps", "server", "roofline")], 1, ""),
    ([TABLE, f"--ignore={TABLE}/test_tune.py"], 8 if GPU else 1, TABLE_KEYWORD),
    ([f"{CHECKS}/test_machine.py"], 1, ""),
)
# A warning is not a wrong number. Other plugins of the machine's environment are not ours.
OPTIONS = ("-q", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-o", "filterwarnings=default",
           "-p", "xdist.plugin", "-p", "gpu_check.plugin", "--max-worker-restart=20", f"--rootdir={ROOT}")  # fmt: skip
RAN, LATE = (0, 1, 5), -1  # pytest's exit statuses: all passed, some failed, none selected; and no time was left


def main() -> None:
    until_s = time.time() + LIMIT_S - END_S
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", dest="keyword", default="", help="only these tests, as pytest's -k")
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT") or (ROOT / "benchmark/results" if GPU else JOURNALS))
    device = torch.cuda.get_device_name() if GPU else "CPU"
    name, date = re.sub(r"[^a-z0-9.]+", "-", device.lower()), f"{datetime.now(UTC):%Y-%m-%d}"
    journal = JOURNALS / f"{name}-{fingerprint()}.jsonl"
    for folder in (journal.parent, out):
        folder.mkdir(parents=True, exist_ok=True)
    journal.touch()
    statuses = [
        run(paths, workers, (keyword, arguments.keyword), journal, until_s) for paths, workers, keyword in SUITES
    ]
    entries = list(read(journal).values())
    verdicts = {target: verdict(target, figures_of(entries), GPU) for target in TARGETS}
    text = as_markdown(f"# GPU check on {device}, {date}", entries, verdicts, GPU)
    stem = out / f"{name}-{date}"
    targets = {target.name: said for target, said in verdicts.items()}
    content = {"device": device, "on_gpu": GPU, "date": date, "targets": targets, "tests": entries}
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    stem.with_name(f"{stem.name}.md").write_text(text)
    if out != journal.parent:
        shutil.copy(journal, out)
    print(f"\n{text}\nwritten: {stem}.json and .md")
    if left := LATE in statuses or any(entry["outcome"] == LATER for entry in entries):
        print("Tests are left: run make gpu-check again.")
    failed = any(entry["outcome"] == "failed" for entry in entries) or not {*RAN, LATE}.issuperset(statuses)
    sys.exit(left or failed or (GPU and not all(said.startswith("met") for said in verdicts.values())))


def fingerprint() -> str:
    """A hash of all sources, so that results of two versions are never mixed."""
    packages = ("benchmark", "common", "launcher", "router", "server", "tools")
    files = sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def run(paths: list[str], workers: int, keywords: Iterable[str], journal: Path, until_s: float) -> int:
    """pytest's exit status."""
    chosen = " and ".join(f"({words})" for words in keywords if words)
    command = [sys.executable, "-m", "pytest", *OPTIONS, f"--journal={journal}", f"--until={until_s}"]
    command += [f"--patience={PATIENCE}", f"--numprocesses={workers}", *(["-k", chosen] if chosen else []), *paths]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=until_s + 20 - time.time()).returncode
    return LATE


if __name__ == "__main__":
    main()
