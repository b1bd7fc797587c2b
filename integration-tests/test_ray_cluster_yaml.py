"""deploy/ray-cluster.yaml: by Ray's own schema, with commands that Ray takes, and the settings that the tests use."""

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from documented import documented, parse
from ray.scripts.scripts import cli, start
from ray_nodes import ray_environment

FILE = Path(__file__).parents[1] / "deploy" / "ray-cluster.yaml"
PAGE = Path(__file__).parents[1] / "docs" / "ray.md"


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def test_the_file_is_a_cluster_by_ray_s_schema(cluster: dict[str, Any]) -> None:
    schema = json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)


@pytest.mark.parametrize("kind", ["head", "worker"])
def test_ray_takes_the_flags_with_which_its_nodes_start(cluster: dict[str, Any], kind: str) -> None:
    (command,) = cluster[f"{kind}_start_ray_commands"]
    words = shlex.split(command.rpartition("/ray start ")[2].replace("$RAY_HEAD_IP", "10.0.0.2"))
    parsed = start.make_context("start", words).params
    assert parsed["head"] is (kind == "head")
    if kind == "head":
        assert parsed["include_dashboard"] is False
        assert parsed["disable_usage_stats"] is True


def test_token_tls_and_health_checks_are_those_of_the_tests_and_of_the_docs(cluster: dict[str, Any]) -> None:
    tested = ray_environment(Path("/etc/tgi/ray"))
    written = dict(word.split("=", 1) for word in cluster["setup_commands"][1].split() if word.startswith("RAY_"))
    assert written == tested
    page = PAGE.read_text()
    for name in tested.keys() - {"RAY_USAGE_STATS_ENABLED"}:
        assert name in page


def test_ray_takes_the_documented_commands() -> None:
    commands = [command for command in documented() if command.program == "ray"]
    assert len(commands) >= 2
    for command in commands:
        parse(cli, list(command.words[1:]))
