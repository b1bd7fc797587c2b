"""The parts of the image that run without Docker: entry point and health check, and what the Dockerfile says of them.

`make test-image` builds the image itself (prove_image.py)."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from dockerfile import REPOSITORY, context, stages
from server_process import LAUNCHER as SERVER_S_LAUNCHER

DEPLOY = REPOSITORY / "deploy"
BUILD, IMAGE = stages()
USER, NET_BIND_SERVICE = 1000, 1 << 10
# Stands for text-generation-launcher, and tells how it was started: a line for each fact.
LAUNCHER = r"""#!/bin/sh
printf 'uid %s\n' "$(id -u)"
printf 'rights %s\n' "$(sed -n 's/^CapEff:\t//p' /proc/self/status)"
for argument; do printf 'argument %s\n' "$argument"; done
env | sed 's/^/environ /'
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")


@dataclass(frozen=True, slots=True)
class Start:
    """How the launcher was started, and what the entry point has said."""

    uid: int
    rights: int
    arguments: list[str]
    environ: dict[str, str]
    said: str

    @classmethod
    def of(cls, output: str, said: str) -> "Start":
        facts = [line.partition(" ")[::2] for line in output.splitlines()]
        [uid], [rights], arguments, environ = (
            [value for name, value in facts if name == asked] for asked in ("uid", "rights", "argument", "environ")
        )
        return cls(int(uid), int(rights, 16), arguments, dict(each.split("=", 1) for each in environ), said)


class Container:
    """A folder that every user can read, with the entry point, its launcher and /data."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.data = folder / "data"
        self.data.mkdir()
        shutil.copy(DEPLOY / "entrypoint.sh", folder / "entrypoint.sh")
        (folder / "text-generation-launcher").write_text(LAUNCHER)
        (folder / "text-generation-launcher").chmod(0o755)
        self._folder = folder

    def start(self, *arguments: str, user: int | None = None, **environ: str) -> Start:
        """`user` as of `docker run --user`."""
        as_user = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        path = {"PATH": f"{self._folder}:{os.environ['PATH']}", "HF_HOME": str(self.data)}
        started = subprocess.run(
            [*as_user, self._folder / "entrypoint.sh", *arguments],
            env=path | environ,
            capture_output=True,
            text=True,
            check=True,
        )
        return Start.of(started.stdout, started.stderr)


@pytest.fixture
def container() -> Iterator[Container]:
    folder = Path(tempfile.mkdtemp(prefix="image-"))
    yield Container(folder)
    shutil.rmtree(folder)


@needs_root
def test_root_gives_its_data_to_the_server_and_leaves_what_others_own(container: Container) -> None:
    (container.data / "hub").mkdir()
    others = container.data / "of another user"
    others.touch()
    os.chown(others, 4242, 4242)
    (container.data / "link").symlink_to("/etc/passwd")
    start = container.start("--model-id", "org/a model", "--json-output")
    assert (start.uid, start.rights, start.said) == (USER, NET_BIND_SERVICE, "")
    assert start.arguments == ["--model-id", "org/a model", "--json-output"]
    owners = {path.name: path.lstat().st_uid for path in (container.data, *container.data.iterdir())}
    assert owners == {"data": USER, "hub": USER, "of another user": 4242, "link": USER}
    assert Path("/etc/passwd").stat().st_uid == 0


@needs_root
def test_another_user_stays_that_user_and_data_stays_as_it_is(container: Container) -> None:
    os.chown(container.data, 12345, 12345)
    (container.data / "of root").touch()
    start = container.start(user=12345)
    assert (start.uid, start.rights, start.said) == (12345, 0, "")
    assert (container.data / "of root").stat().st_uid == 0


@needs_root
@pytest.mark.parametrize("user", [None, 12345])
def test_data_that_cannot_be_written_is_served_and_the_log_says_so(container: Container, user: int | None) -> None:
    os.chown(container.data, 4242, 4242)
    start, uid = container.start(user=user), user or USER
    assert start.uid == uid
    assert start.said.startswith(f"{container.data} cannot be written by uid {uid}, its owner is uid 4242: only models")
    assert start.said.count("\n") == 1 and "--user 4242" in start.said


@pytest.mark.parametrize(
    ("there", "given", "cache"),
    [
        ((), None, None),
        (("models--org--model",), None, "data"),
        (("hub", "models--org--model"), None, None),
        (("models--org--model",), "elsewhere", "elsewhere"),
    ],
    ids=["empty", "of an older TGI", "of a newer TGI", "given"],
)
def test_the_cache_of_the_hub_is_where_tgi_s_volume_has_it(
    container: Container, there: tuple[str, ...], given: str | None, cache: str | None
) -> None:
    for name in there:
        (container.data / name).mkdir()
    places = {"data": str(container.data), "elsewhere": str(container.data.parent / "elsewhere"), None: None}
    variables = {} if given is None else {"HUGGINGFACE_HUB_CACHE": places[given] or ""}
    assert container.start(**variables).environ.get("HUGGINGFACE_HUB_CACHE") == places[cache]


SAGEMAKER = {
    "HF_MODEL_ID": "org/m", "HF_MODEL_REVISION": "v1", "SM_NUM_GPUS": "4", "HF_MODEL_QUANTIZE": "awq",
    "HF_MODEL_TRUST_REMOTE_CODE": "true", "SAGEMAKER_BIND_TO_PORT": "8081", "MODEL_ID": "org/other", "PORT": "80",
}  # fmt: skip


def test_sagemaker_s_variables_are_those_of_the_launcher(container: Container) -> None:
    start = container.start("serve", "--print-config", **SAGEMAKER)
    command = [SERVER_S_LAUNCHER, *start.arguments]
    printed = subprocess.run(command, env=start.environ, capture_output=True, text=True)
    values = [" ".join(line.split()) for line in printed.stdout.splitlines()]
    assert {
        'model-id = "org/m" # variable MODEL_ID',
        'revision = "v1" # variable REVISION',
        "num-shard = 4 # variable NUM_SHARD",
        'quantize = "awq" # variable QUANTIZE',
        "port = 8081 # flag",
        "# trust-remote-code = true # variable TRUST_REMOTE_CODE: refused",
        "# HF_MODEL_ID is set, and the launcher does not read it",
    } <= {*values}, printed
    error, _ = printed.stderr.splitlines()
    assert "--trust-remote-code is not supported yet" in error


def test_sagemaker_starts_the_image_with_serve_and_names_a_model(container: Container) -> None:
    start = container.start("serve", NUM_SHARD="2")
    assert (start.arguments, start.environ["MODEL_ID"]) == (["--port", "8080"], "")  # which the launcher refuses
    assert start.environ["NUM_SHARD"] == "2"
    plain = container.start("--model-id", "serve", SM_NUM_GPUS="4", PORT="80")
    assert plain.arguments == ["--model-id", "serve"] and not {"MODEL_ID", "NUM_SHARD"} & plain.environ.keys()


@pytest.mark.parametrize(("status", "ends_with"), [(200, 0), (503, 1), (None, 1)])
def test_the_health_check_asks_the_server(status: int | None, ends_with: int) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if status is not None and self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port if status is not None else 1
        environ = {**os.environ, "PORT": str(port)}
        checked = subprocess.run([sys.executable, DEPLOY / "healthcheck.py"], env=environ, capture_output=True)
        server.shutdown()
    assert checked.returncode == ends_with


@pytest.mark.parametrize(
    ("command_line", "port"),
    [
        ("text-generation-launcher", "80"),
        ("python\0text-generation-launcher\0--port\08080\0--num-shard\02\0", "8080"),
        ("tini\0--\0entrypoint.sh\0--port=8080\0--prometheus-port=9000\0", "8080"),
        ("python\0launcher\0-p\08080\0", "8080"),
        ("python\0launcher\0-p8080\0", "8080"),
        ("python\0launcher\0--model-id\0x--port\0--prometheus-port\09000\0", "80"),
    ],
)
def test_the_health_check_knows_the_port_of_the_command_line(command_line: str, port: str) -> None:
    program = "import runpy, sys; print(runpy.run_path(sys.argv[1])['port_of'](eval(sys.argv[2]), '80'))"
    command = [sys.executable, "-c", program, DEPLOY / "healthcheck.py", repr(command_line.encode())]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == port


def test_the_image_is_in_the_place_of_tgi_s() -> None:
    assert IMAGE.environ["HF_HOME"] == "/data" and IMAGE.environ["PORT"] == "80" == IMAGE.texts("EXPOSE")[0]
    copied = {Path(word).name for text in IMAGE.texts("COPY") for word in text.split()}
    for word in (*IMAGE.entry_point, *IMAGE.health_command[1:]):
        assert Path(word).name in copied and (DEPLOY / Path(word).name).exists()
    assert os.access(DEPLOY / Path(IMAGE.entry_point[0]).name, os.X_OK)
    folder = next(text for text in IMAGE.texts("RUN") if "/data" in text)
    assert f"useradd --uid {USER}" in folder and f"--owner {USER}" in folder
    assert f"user={USER}\n" in (DEPLOY / "entrypoint.sh").read_text()


def test_the_build_sees_what_the_package_is_made_of_and_no_test() -> None:
    seen = set(context())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert not [path for path in seen if "/tests/" in path]
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        if not package.startswith("proto/"):  # made by the build, of the .proto files
            listed = subprocess.run(["git", "ls-files", package], cwd=REPOSITORY, capture_output=True, text=True)
            assert {path for path in listed.stdout.splitlines() if "/tests/" not in path} <= seen
    assert {"hatch_build.py", "pyproject.toml", "proto/generate.proto", "deploy/entrypoint.sh"} <= seen


def test_the_packages_of_the_extras_are_locked(tmp_path: Path) -> None:
    """The pattern of the Dockerfile finds the extras' packages, with their hashes, in the lock of the tests."""
    [text] = [text for text in BUILD.texts("RUN") if "extras.txt" in text]
    select = text.partition("&&")[0].replace(">extras.txt", "")
    found = subprocess.run(["sh", "-ec", select], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"^([a-z][\w-]*)==.*\\\n    --hash=sha256:", found, re.MULTILINE))
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {re.split(r"[<>=]", package)[0] for extra in ("cluster", "otlp") for package in extras[extra]}
    assert asked <= names
    assert not names & set(re.findall(r"^([a-z][\w-]*)==", (REPOSITORY / "requirements/run.txt").read_text(), re.M))
