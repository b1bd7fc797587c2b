"""deploy/: a unit of systemd, a compose file, and the commands of docs/docker.md that use them and the image."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile import stages
from manifests import REPOSITORY, launched, manifests
from pages import commands

from text_generation_launcher.serving import DRAIN_MARGIN_S

DEPLOY, MONITORING = REPOSITORY / "deploy", REPOSITORY / "monitoring"
UNIT = DEPLOY / "tgi-py.service"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVER = COMPOSE["services"]["server"]
PAGE = REPOSITORY / "docs" / "docker.md"
BUILD, IMAGE = stages()
IMAGE_NAME = "tgi-py"
# Flags of `docker run` that have a value.
WITH_VALUE = {"--gpus", "--shm-size", "--user", "-e", "-p", "-v"}


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


def config_of(name: str) -> Any:
    return yaml.safe_load(COMPOSE["configs"][name]["content"])


def mounts(service: str) -> dict[str, str]:
    """What a service of the compose file sees, by the path at which it sees it."""
    volumes = (each.removesuffix(":ro").split(":") for each in COMPOSE["services"][service]["volumes"])
    return {target: source for source, target in volumes}


def test_one_image_has_one_name() -> None:
    [*built] = [shlex.split(command) for command in commands(PAGE, "docker build")]
    assert built and all(words[words.index("--tag") + 1] == IMAGE_NAME for words in built)
    pods = (each["spec"]["template"]["spec"] for each in manifests() if "template" in each.get("spec", {}))
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert images | {SERVER["image"]} == {IMAGE_NAME}


def test_the_server_of_the_compose_file_is_that_of_the_dockerfile() -> None:
    build = SERVER["build"]
    assert (DEPLOY / build["context"]).resolve() == REPOSITORY and (REPOSITORY / build["dockerfile"]).exists()
    config = launched(["text-generation-launcher", *SERVER["command"]])
    [port] = SERVER["ports"]
    assert port.split(":")[1] == IMAGE.environ["PORT"]
    assert mounts("server") == {IMAGE.environ["HF_HOME"]: "data"} and "data" in COMPOSE["volumes"]
    minutes = int(SERVER["stop_grace_period"].removesuffix("m"))
    assert 60 * minutes > config.http.graceful_termination_timeout + DRAIN_MARGIN_S


def test_prometheus_of_the_compose_file_asks_its_server_and_has_our_alerts() -> None:
    ours, sample = config_of("prometheus"), yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    [[target]] = [each["targets"] for each in ours["scrape_configs"][0]["static_configs"]]
    assert target == f"server:{IMAGE.environ['PORT']}"
    ours["scrape_configs"][0]["static_configs"][0]["targets"] = ["localhost:3000"]
    ours["scrape_configs"][0]["metrics_path"] = "/metrics"
    assert ours == sample
    command = dict(word.split("=", 1) for word in COMPOSE["services"]["prometheus"]["command"])
    folder = Path(command["--config.file"]).parent
    assert (DEPLOY / mounts("prometheus")[f"{folder}/{ours['rule_files'][0]}"]).samefile(MONITORING / "alerts.yaml")


def test_grafana_of_the_compose_file_has_our_board_and_its_source() -> None:
    grafana = COMPOSE["services"]["grafana"]
    places = {each["source"]: each["target"] for each in grafana["configs"]}
    assert {Path(place).parent.name for place in places.values()} == {"datasources", "dashboards"}
    [source] = config_of("datasource")["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]
    assert (
        source["url"] == "http://prometheus:9090"
        and "127.0.0.1:9090:9090" in COMPOSE["services"]["prometheus"]["ports"]
    )
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / mounts("grafana")[home]).samefile(MONITORING / "grafana-dashboard.json")
    [provider] = config_of("dashboards")["providers"]
    assert provider["options"]["path"] == str(Path(home).parent)


def test_everything_that_services_share_is_declared() -> None:
    for service in COMPOSE["services"].values():
        assert {each["source"] for each in service.get("configs", ())} <= COMPOSE["configs"].keys()
        named = {each.split(":")[0] for each in service["volumes"] if not each.startswith(".")}
        assert named <= COMPOSE["volumes"].keys()
    gpus = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]
    assert gpus.keys() <= COMPOSE["services"].keys()


def runs() -> list[str]:
    return list(commands(PAGE, "docker run"))


@pytest.mark.parametrize("command", runs())
def test_a_documented_container_starts_our_launcher_on_a_port_that_is_published(command: str) -> None:
    words, flags = shlex.split(command)[2:], {}
    while words[0] != IMAGE_NAME:
        name = words.pop(0)
        assert name in WITH_VALUE
        flags[name] = words.pop(0)
    launched(["text-generation-launcher", *words[1:]])
    assert flags["-p"].split(":")[1] == IMAGE.environ["PORT"]
    if "-v" in flags:
        assert flags["-v"].split(":")[1] == IMAGE.environ["HF_HOME"]


def test_files_and_arguments_that_the_page_names_exist() -> None:
    asked = [*commands(PAGE, "docker build"), *commands(PAGE, "docker compose"), *commands(PAGE, "kubectl apply")]
    assert len(asked) == 5
    for words in map(shlex.split, asked):
        files = [value for name, value in pairwise(words) if name in ("--file", "--filename")]
        assert files and all((REPOSITORY / file).exists() for file in files)
        for name, value in pairwise(words):
            if name == "--build-arg":
                assert f"{value.partition('=')[0]}=" in BUILD.texts("ARG")
    [stop] = [shlex.split(command) for command in commands(PAGE, "docker stop")]
    patience_s = launched(["text-generation-launcher"]).http.graceful_termination_timeout + DRAIN_MARGIN_S
    assert int(stop[stop.index("--time") + 1]) > patience_s
