"""`text-generation-launcher scale N`, `replicas` and `restart-fronts`: commands to a launcher that runs, through the
socket that `control.py` serves."""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from text_generation_common.errors import CommandError
from text_generation_common.flags.declaration import REQUIRED, borrowed, flag
from text_generation_common.flags.http import HttpFlags
from text_generation_common.flags.process import InheritedFlags
from text_generation_common.flags.programs import ProgramFlags
from text_generation_common.json_values import from_fields
from text_generation_common.link import ReplicaReport, ReplicaState
from text_generation_common.places import find_control_socket
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.errors import WebserverFailed

CONTROL = ProgramFlags(
    changes={
        "port": {"help": "Port of the server."},
        "shard_uds_path": {"help": "The server's --shard-uds-path, if it has one."},
    }
)
# Bytes of a line, and seconds for the answer.
LINE_BYTES, ANSWER_S = 2**20, 30.0
Echo = Callable[[str], None]


def send_command(path: str, command: Mapping[str, Any]) -> Any:
    """The answer of the launcher at `path`. CommandError if it refuses, or there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(path)
            connection.sendall(json.dumps(command).encode() + b"\n")
            with connection.makefile("rb") as answers:
                answer = json.loads(answers.readline(LINE_BYTES))
        except (OSError, ValueError) as error:
            raise WebserverFailed(
                f"no launcher with --replicas or --api-workers answers at {path} ({error})",
                "give the --port or the --shard-uds-path of its start, and the same XDG_RUNTIME_DIR",
            ) from None
    if "error" in answer:
        raise CommandError(str(answer["error"]), str(answer["hint"]))
    return answer["answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFlags:
    """Finds the launcher."""

    port: int = borrowed(HttpFlags, "port")
    shard_uds_path: str | None = borrowed(LauncherConfig, "shard_uds_path")
    inherited: InheritedFlags = InheritedFlags()

    def send(self, command: Mapping[str, Any]) -> Any:
        return send_command(find_control_socket(self.port, self.shard_uds_path, self.inherited.runtime_dir), command)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFlags:
    number: int = flag(REQUIRED, "Number of replicas that there are to be.", env=False, positional=True)
    control: ControlFlags = ControlFlags()


def scale(flags: ScaleFlags, echo: Echo) -> None:
    _report(flags.control.send({"command": "scale", "replicas": flags.number}), echo)


def replicas(flags: ControlFlags, echo: Echo) -> None:
    _report(flags.send({"command": "replicas"}), echo)


def restart_fronts(flags: ControlFlags, echo: Echo) -> None:
    flags.send({"command": "restart-fronts"})
    echo("The fronts are replaced one after another; the launcher's log tells how far it is")


def _report(answer: Mapping[str, Any], echo: Echo) -> None:
    report = from_fields(ReplicaReport, answer)
    ready, requests = report.count(ReplicaState.READY), answer["num_requests"]
    echo(f"{report.wanted} wanted, {ready} ready; {requests} requests")
    for replica in report.replicas:
        echo("  ".join(filter(None, (replica.name, replica.state, replica.endpoint, replica.reason))))
