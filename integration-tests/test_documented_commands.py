"""The commands of our documents and of systemd units in them are taken by our own command line."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from manifests import REPOSITORY, launched
from pages import PAGES, commands

from text_generation_common.cluster.certificates import host_of, read_certificates
from text_generation_common.cluster.endpoints import TcpEndpoint, parse_endpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.flags.cluster import Way
from text_generation_launcher import cli
from text_generation_launcher.cluster_plan import resolve_cluster


def launches() -> list[str]:
    found = [command for page in PAGES for command in commands(page, "text-generation-launcher")]
    return [command for command in found if command.split()[1].startswith("--")]


@pytest.mark.parametrize("command", launches())
def test_a_documented_command_is_taken(command, tmp_path):
    flags = launched(shlex.split(command)).cluster
    (tmp_path / "engines").mkdir()
    if flags.security.tls_dir is not None:
        flags = replace(flags, security=replace(flags.security, tls_dir=str(tmp_path)))
    if (file := flags.engine.engine_address_file) is not None:
        flags = replace(flags, engine=replace(flags.engine, engine_address_file=str(tmp_path / file)))
    assert resolve_cluster(flags)


def to_a_running_server() -> list[str]:
    found = [command for page in PAGES for command in commands(page, "text-generation-launcher")]
    return [command for command in found if command.split()[1] in ("scale", "replicas", "restart-fronts")]


@pytest.mark.parametrize("command", to_a_running_server())
def test_a_documented_command_to_a_running_server_is_taken(command, tmp_path, capsys):
    """There is no server, so a command of the right form is answered by an error about that."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*shlex.split(command)[1:], "--shard-uds-path", str(tmp_path / "none")])
    assert ended.value.code == 1, capsys.readouterr().err


def test_metrics_that_the_page_of_machines_names_exist():
    golden = (REPOSITORY / "router/text_generation_router/metrics/tests/metrics.golden").read_text()
    named = set(re.findall(r"`(tgi_\w+)`", (REPOSITORY / "docs" / "machines.md").read_text()))
    assert "tgi_queue_size" in named
    assert named <= set(re.findall(r"^# TYPE (\S+)", golden, re.MULTILINE))


def test_every_way_to_serve_is_documented():
    assert {launched(shlex.split(command)).cluster.way for command in launches()} == set(Way)


def test_the_documented_certificates_are_those_that_pods_mount_and_fronts_ask_for(tmp_path):
    page = REPOSITORY / "docs" / "machines.md"
    made = [command for command in commands(page, "text-generation-launcher certs") if "tgi-engines" in command]
    program = Path(sys.executable).parent / "text-generation-launcher"
    for command in made:
        subprocess.run([program, *shlex.split(command)[1:]], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    secrets = {}
    for command in commands(page, "kubectl create secret generic"):
        name, source = shlex.split(command)[4:]
        secrets[name] = tmp_path / source.removeprefix("--from-file=")
    assert secrets.keys() == {f"tgi-{role}" for role in Role}
    [asked] = [
        parse_endpoint(word.partition("=")[2])
        for word in (REPOSITORY / "deploy/kubernetes/fronts.yaml").read_text().split()
        if word.startswith("--engines-dns=")
    ]
    assert isinstance(asked, TcpEndpoint)
    for role in Role:
        found = read_certificates(secrets[f"tgi-{role}"], role)
        assert found.identity.role is role
        assert (secrets[f"tgi-{role}"] / "cluster.key").exists(), "the key of the block hashes goes with them"
    assert host_of(secrets["tgi-engine"]) == asked.host
