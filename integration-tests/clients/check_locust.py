"""Runs locust with eight users for five seconds against the server at argv[1]."""

import json
import subprocess
import sys
from pathlib import Path

from checks import Checks

LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def no_request_fails(url: str) -> None:
    arguments = ["--headless", "--users", "8", "--spawn-rate", "8", "--run-time", "5s", "--stop-timeout", "10"]
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", url, "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-400:]
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(rows) == {"/generate", "/v1/chat/completions", "/v1/completions"}, set(rows)
    assert all(row["num_requests"] > 0 and row["num_failures"] == 0 for row in rows.values()), rows


if __name__ == "__main__":
    checks = Checks("locust")
    checks.run("no_request_fails", lambda: no_request_fails(sys.argv[1]))
    checks.exit()
