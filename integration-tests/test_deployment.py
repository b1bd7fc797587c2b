"""deploy/: a unit of systemd, and what it starts."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from manifests import REPOSITORY, launched

from text_generation_launcher.serving import DRAIN_MARGIN_S

UNIT = REPOSITORY / "deploy" / "tgi-py.service"


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    return dict(unit["Service"])


def test_the_unit_waits_for_readiness_and_for_the_drain(service: dict[str, str]) -> None:
    config = launched(shlex.split(service["ExecStart"]))
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert int(service["WatchdogSec"]) >= 10
    patience_s = config.http.graceful_termination_timeout + DRAIN_MARGIN_S
    assert service["KillMode"] == "mixed" and int(service["TimeoutStopSec"]) > patience_s


def test_folders_that_the_unit_names_are_those_that_systemd_makes(service: dict[str, str]) -> None:
    places = dict(word.split("=", 1) for word in service["Environment"].split())
    assert places["HF_HOME"] == places["HOME"] == f"/var/lib/{service['StateDirectory']}"
    assert places["XDG_RUNTIME_DIR"] == f"/run/{service['RuntimeDirectory']}"
    assert service["RuntimeDirectoryMode"] == "0700"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze on the PATH")
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub(r"/opt/tgi-py/bin/\S+", sys.executable, UNIT.read_text()))
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr.strip()) == (0, "")
