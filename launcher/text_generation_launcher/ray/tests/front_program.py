"""Stands for a launcher of fronts: answers on the control socket, says that its clients have as many requests as there
are engines in the file, and that they wait for as many seconds as there were restarts, and ends after SIGTERM."""

import argparse
import json
import signal
import socket
import sys
from pathlib import Path


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--shard-uds-path", required=True)
    flags.add_argument("--engines-file", required=True)
    given, _ = flags.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{given.shard_uds_path}-control")
        listener.listen()
        restarts = 0
        while True:
            connection, _ = listener.accept()
            with connection:
                restarts += json.loads(connection.recv(2**16))["command"] == "restart-fronts"
                file = Path(given.engines_file)
                engines = file.read_text().split() if file.exists() else []
                demand = {"wait_s": restarts, "requests": len(engines), "used": 0.25}
                answer = {"answer": {"listens": True, "demand": demand}}
                connection.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
