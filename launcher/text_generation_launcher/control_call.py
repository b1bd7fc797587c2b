"""Sends a command to a running launcher, through the socket that `control.py` serves."""

import json
import socket
from collections.abc import Mapping
from typing import Any

from text_generation_common.errors import CommandError
from text_generation_launcher.errors import WebserverFailed

# Bytes of a line, and seconds for the answer.
LINE_BYTES, ANSWER_S = 2**20, 30.0


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
