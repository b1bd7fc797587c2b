"""Stands for an engine-only launcher: listens on the address it is given, writes it down, and ends after SIGTERM.

Its flags beside those of the address: `--fails TEXT` ends it at once, `--stubborn` has it ignore SIGTERM."""

import argparse
import os
import signal
import socket
import sys


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--engine-address", required=True)
    flags.add_argument("--engine-address-file", required=True)
    flags.add_argument("--fails", default="")
    flags.add_argument("--stubborn", action="store_true")
    given = flags.parse_args()
    if given.fails:
        print(f"Error: {given.fails}", flush=True)
        sys.exit(1)
    # Blocked before anything tells that this process serves: then a signal is never too early.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    host, _, port = given.engine_address.rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        partial = f"{given.engine_address_file}.partial"
        with open(partial, "w") as file:
            file.write(f"{host}:{listener.getsockname()[1]}\n")
        os.replace(partial, given.engine_address_file)
        print("serving", flush=True)
        while True:
            signal.sigwait({signal.SIGTERM})
            if not given.stubborn:
                return


if __name__ == "__main__":
    main()
