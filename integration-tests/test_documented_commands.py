"""The commands of our documents and of systemd units in them work: a test runs them, or their program parses them."""

import json
import logging
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import documented
import httpx
import pytest
from documented import Documented
from manifests import REPOSITORY, launched
from pages import PAGES, commands
from server_process import ServerProcess

from text_generation_common.cluster.certificates import host_of, read_certificates
from text_generation_common.cluster.endpoints import TcpEndpoint, parse_endpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.flags.cluster import Way
from text_generation_launcher import cli
from text_generation_launcher.cluster_plan import resolve_cluster
from text_generation_launcher.terminal import Screen

COMMANDS = documented.documented()
README = REPOSITORY / "README.md"


def test_every_documented_command_is_run_or_parsed() -> None:
    ways = Counter()
    for command in COMMANDS:
        try:
            way = documented.check(command)
        except BaseException as error:  # click ends with SystemExit
            pytest.fail(f"{command}: {error}")
        ways[way] += 1
        print(f"{way:40} {command}")
    assert len(ways) > 5 and ways["run: test_documented_commands.py"] >= 7, ways


def sent(command: Documented, url: str) -> httpx.Response:
    """The answer to a documented call of curl."""
    words = iter(command.words[1:])
    given: dict[str, Any] = {"headers": {}}
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(": ")
            given["headers"][name] = value
        elif word == "-d":
            given["content"] = next(words)
        elif word != "-N":
            given["url"] = documented.SERVER.sub(url, word)
    return httpx.post(**given, timeout=60)


CALLS = [command for command in COMMANDS if documented.check(command) == "run: test_documented_commands.py"]


@pytest.mark.parametrize("command", CALLS, ids=lambda call: call.page)
def test_a_documented_call_is_answered(command: Documented, server: ServerProcess) -> None:
    answer = sent(command, server.url)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text


VARYING = re.compile(r'"(?:id|created|cached_tokens|system_fingerprint)":("[^"]*"|\d+)')


def test_the_answers_in_the_readme_are_those_of_the_server(server: ServerProcess) -> None:
    shown = re.findall(r"^```json\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    calls = [command for command in CALLS if command.page == README.name]
    assert len(shown) == len(calls) == 2
    for text, command in zip(shown, calls, strict=True):
        told, real = (json.loads(VARYING.sub('"x":0', each)) for each in (text, sent(command, server.url).text))
        assert told == real


def on_a_terminal(log: str) -> list[str]:
    """The lines that a terminal shows of a log, as far as the server's address, without the time. A slow machine has
    further lines, about waiting, and the tests' type of numbers may have one about kernels."""
    screen, lines = Screen(has_colors=False), list[str]()
    for message in re.findall(r"^\S+ +INFO [\w.]+: (.*)$", log, re.MULTILINE):
        record = logging.makeLogRecord({"msg": message, "levelno": logging.INFO, "levelname": "INFO"})
        if not message.startswith(("Waiting for ", "decode steps run ")) and screen.filter(record):
            lines += screen.format(record).splitlines()
        if lines and ADDRESS.fullmatch(lines[-1]):
            break  # other tests' requests follow
    return [CLOCK.sub("", line) for line in lines]


CLOCK = re.compile(r"^\d\d:\d\d:\d\d  ")
ADDRESS = re.compile(r"http://\S+:\d+")
# What the processor, the machine's memory and the flags of the tests' server make different.
DIFFERS = re.compile(r"(?<=Loaded, warming up: ).*|(?<=Room for )\d+|http://\S+")


def test_the_start_in_the_readme_is_that_of_a_server(server: ServerProcess) -> None:
    for page in (README, REPOSITORY / "docs" / "running.md"):
        block = next(block for block in documented.blocks(page) if "http://localhost:3000" in block)
        shown = [CLOCK.sub("", line) for line in block]
        assert shown.pop(1) == "Port 3000 is open to other machines; --hostname 127.0.0.1 closes it"
        assert [DIFFERS.sub("", line) for line in shown] == [
            DIFFERS.sub("", line) for line in on_a_terminal(server.log())
        ]


def test_the_python_of_the_readme_runs(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    exec(program.replace("http://localhost:3000", server.url), {})
    assert len(capsys.readouterr().out.split()) > 20


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
