"""Builds the image of deploy/Dockerfile without Docker, and serves the demo model from it.

The lines of the Dockerfile are executed in changed roots of Debian, which debootstrap makes. The server then runs as in
a container: as process 1, with the rights that Docker leaves to a container, on a network of its own. As root.
`make test-image` starts this program.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dockerfile import REPOSITORY, Stage, context, stages

# Rights of a container that Docker starts.
RIGHTS = (
    "chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw sys_chroot mknod audit_write"
    " setfcap"
)
NET_BIND_SERVICE = 1 << 10
PATH = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
START_LIMIT_S, STOP_LIMIT_S = 180.0, 60.0
MODEL = "/opt/tgi-py/lib/python3.11/site-packages/text_generation_server/demo_model"
ASK = """
import json, sys, urllib.request
body = json.dumps({"inputs": "Once upon a time", "parameters": {"max_new_tokens": 5}}).encode()
request = urllib.request.Request("http://127.0.0.1:80/generate", body, {"content-type": "application/json"})
print(json.loads(urllib.request.urlopen(request, timeout=60).read())["generated_text"])
"""


class Roots:
    """Folders in which the stages are built."""

    def __init__(self, folder: Path, base: Path, binds: Sequence[str], environ: dict[str, str]) -> None:
        self._folder, self._base, self._binds, self._environ = folder, base, binds, environ
        self._built: dict[str, Path] = {}

    def build(self, stage: Stage) -> Path:
        """The root of a stage. It is taken as it is if it is there: its folder has its name only when it is whole."""
        root = self._built[stage.name] = self._folder / (stage.name or "image")
        if root.exists():
            return root
        partial = root.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run(["cp", "-a", self._base, partial], check=True)
        place, environ = "/", dict(PATH)
        for each in stage.instructions:
            started_s = time.monotonic()
            if each.name == "RUN":
                self._run(partial, place, environ, each.text)
            elif each.name == "WORKDIR":
                place = each.text
                (partial / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif each.name == "ENV":
                environ |= environ_of(each.text)
            elif each.name == "COPY":
                self._copy(partial, place, each.text.split())
            elif each.name not in ("ARG", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"):
                raise SystemExit(f"{each.name}: this program does not know the instruction")
            print(f"{time.monotonic() - started_s:6.1f} s  {each.name} {each.text[:90]}", flush=True)
        partial.rename(root)
        return root

    def _run(self, root: Path, place: str, environ: dict[str, str], text: str) -> None:
        mounts = [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        for source in ("/etc/resolv.conf", *self._binds):
            target = root / source.lstrip("/")
            if Path(source).is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            mounts.append(f"mount --bind {source} {target}")
        words = [f"{name}={value}" for name, value in (environ | self._environ).items()]
        inside = ["chroot", str(root), "env", "-i", *words, "sh", "-ec", f"cd {place}; {text}"]
        outside = " && ".join(mounts) + ' && exec "$@"'
        subprocess.run(["unshare", "--mount", "sh", "-ec", outside, "sh", *inside], check=True)

    def _copy(self, root: Path, place: str, words: list[str]) -> None:
        *sources, target = words
        if sources[0].startswith("--from="):
            other = self._built[sources.pop(0).removeprefix("--from=")]
            subprocess.run(["cp", "-a", *(f"{other}{source}" for source in sources), f"{root}{target}"], check=True)
            return
        for path in context():
            around = next(
                (source for source in sources if source == "." or path == source or path.startswith(source + "/")), None
            )
            if around is not None:
                name = path if around == "." else path.removeprefix(around).lstrip("/") or Path(path).name
                to = root / os.path.join(place, target).lstrip("/") / name
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / path, to)


def environ_of(text: str) -> dict[str, str]:
    words = (word.split("=", 1) for word in text.split())
    return {name: value.replace("$PATH", PATH["PATH"]) for name, value in words}


class Container:
    """A server of the image that runs. `pid` is that of its process 1 on this machine."""

    def __init__(self, root: Path, pid: int, log: Path, stage: Stage, environ: dict[str, str]) -> None:
        self._root, self.pid, self._log, self._stage = root, pid, log, stage
        self._words = [f"{name}={value}" for name, value in environ.items()]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--target={self.pid}", "--all", "chroot", str(self._root), "env", "-i", *self._words]
        return subprocess.run([*enter, *command], capture_output=True, text=True)

    def wait_until_healthy(self) -> None:
        limit_s = time.monotonic() + START_LIMIT_S
        while (asked := self.run(*self._stage.health_command)).returncode:
            check(time.monotonic() < limit_s and Path(f"/proc/{self.pid}").exists(), asked.stderr + self.log)
            time.sleep(0.5)

    def users(self) -> set[int]:
        """The users of all processes of the server."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        return {path.stat().st_uid for path in Path("/proc").glob("[0-9]*") if _namespace(path) == own}

    def rights(self) -> int:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(status["CapEff"], 16)


def _namespace(process: Path) -> str:
    try:
        return os.readlink(process / "ns/pid")
    except OSError:
        return ""


@contextmanager
def started(
    root: Path, stage: Stage, environ: dict[str, str], *arguments: str, user: str = "0:0", setup: str = ":"
) -> Iterator[Container]:
    """The image's entry point with `arguments`, as Docker starts it. `setup`: commands before, in its namespaces."""
    prepare = (
        f"mount -t proc proc {root}/proc; mount --rbind /dev {root}/dev; mount -t tmpfs -o mode=1777 tmpfs {root}/tmp;"
        f' ip link set lo up; {setup}; exec "$@"'
    )
    rights = "-all," + ",".join(f"+{right}" for right in RIGHTS.split())
    inner = ["setpriv", f"--bounding-set={rights}", "chroot", f"--userspec={user}", str(root), "env", "-i"]
    words = [f"{name}={value}" for name, value in environ.items()]
    command = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "sh", "-ec", prepare, "sh"]
    with tempfile.NamedTemporaryFile() as output:
        log = Path(output.name)
        outer = subprocess.Popen(
            [*command, *inner, *words, *stage.entry_point, *arguments], stdout=output, stderr=subprocess.STDOUT
        )
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        while not (pids := children.read_text().split()):
            time.sleep(0.05)
        container = Container(root, int(pids[0]), log, stage, environ)
        try:
            container.wait_until_healthy()
            yield container
            os.kill(container.pid, signal.SIGTERM)
            check(outer.wait(STOP_LIMIT_S) == 0, "SIGTERM ends the server with status 0")
        except BaseException:
            print(container.log, file=sys.stderr)
            raise
        finally:
            outer.kill()
            outer.wait()


def check(is_so: bool, what: str) -> None:
    if not is_so:
        raise SystemExit(f"Not so: {what}")


def prove(root: Path, stage: Stage, environ: dict[str, str]) -> None:
    data = root / "data"
    subprocess.run(["chown", "0:0", data], check=True)  # as Docker makes a folder of the host
    with started(root, stage, environ) as server:
        text = server.run("python", "-c", ASK).stdout.strip()
        check(bool(text), "the demo model answers on port 80")
        check(server.users() == {1000}, f"all processes are those of uid 1000: {server.users()}")
        check(server.rights() == NET_BIND_SERVICE, "the right to listen on port 80 is the only one")
        check(data.stat().st_uid == 1000, "/data belongs to uid 1000")
        print(f"as root: serves as uid 1000 on port 80, /data is its own: {text!r}")
    ports = "echo 0 >/proc/sys/net/ipv4/ip_unprivileged_port_start"  # as Docker does
    subprocess.run(["chown", "12345:12345", data], check=True)
    with started(root, stage, environ, user="12345:12345", setup=ports) as server:
        check(bool(server.run("python", "-c", ASK).stdout.strip()), "the demo model answers")
        check(server.users() == {12345} and data.stat().st_uid == 12345, "--user is kept, and /data as it was")
        check("cannot be written" not in server.log, "nothing to complain about")
        print("--user 12345:12345: kept")
    snapshot = data / "models--org--demo" / "snapshots" / "c0ffee"
    shutil.copytree(root / MODEL.lstrip("/"), snapshot)
    (data / "models--org--demo" / "refs").mkdir()
    (data / "models--org--demo" / "refs" / "main").write_text("c0ffee")
    read_only = f"mount --bind {data} {data}; mount -o remount,bind,ro {data}"
    with started(root, stage, environ, "--model-id", "org/demo", setup=read_only) as server:
        check(bool(server.run("python", "-c", ASK).stdout.strip()), "a model of an older TGI's volume is served")
        check("/data cannot be written by uid 1000" in server.log, "the log says what is missing")
        print("/data read-only: the model there is served, and the log says that others cannot be downloaded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="a Debian that debootstrap has made; made anew when not given")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    parser.add_argument(
        "--bind",
        action="append",
        default=[],
        help="a file or folder of this machine that pip needs, at a path where Debian's packages write nothing",
    )
    parser.add_argument("--env", action="append", default=[], help="NAME of a variable that pip needs")
    parser.add_argument("--folder", type=Path, help="keep the roots here, and take those that are there")
    arguments = parser.parse_args()
    check(os.geteuid() == 0, "this program runs as root")
    check(bool(arguments.base or shutil.which("debootstrap")), "debootstrap is installed")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="image-"))
    try:
        base = arguments.base or folder / "debian"
        if not base.exists():
            subprocess.run(["debootstrap", "--variant=minbase", "bookworm", base, arguments.mirror], check=True)
        roots = Roots(folder, base, arguments.bind, {name: os.environ[name] for name in arguments.env})
        *_, image = [(roots.build(stage), stage) for stage in stages()]
        root, stage = image
        size = subprocess.run(["du", "-sxm", root], capture_output=True, text=True, check=True).stdout.split()[0]
        print(f"The image has {size} MiB, Debian included: {json.dumps(stage.entry_point)}")
        prove(root, stage, PATH | environ_of(" ".join(stage.texts("ENV"))))
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
