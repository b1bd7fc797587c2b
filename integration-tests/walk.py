"""The walk of one token: which functions are called, from the result of a decode step in the shard to the bytes of an
event in the router. Of the walks of one stream, the most frequent one. In Python code of ours only, all helpers
included, list comprehensions not counted.

    python integration-tests/walk.py [--launcher OTHER/.venv/bin/text-generation-launcher]
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import httpx
from server_process import LAUNCHER, ServerProcess

TOKENS = 200


def walks(launcher: Path, folder: Path) -> dict[str, list[str]]:
    """The calls of the most frequent walk, by the name of the program."""
    environ = {"WALK": str(folder), "PYTHONPATH": str(Path(__file__).with_name("walk"))}
    asked = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": TOKENS, "ignore_eos_token": True}}
    with ServerProcess("--dtype", "float32", "--max-total-tokens", "512", launcher=launcher, environ=environ) as server:
        httpx.post(f"{server.url}/generate_stream", json=asked, timeout=600).raise_for_status()
    found = {}
    for program in ("text-generation-server", "text-generation-router"):
        lines = [line for file in folder.glob(f"{program}.*") for line in file.read_text().splitlines()]
        ((most, _),) = Counter(lines).most_common(1)
        found[program] = most.split("\t")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", type=Path, default=LAUNCHER, help="another version's launcher")
    with tempfile.TemporaryDirectory(prefix="tgi-walk-") as folder:
        found = walks(parser.parse_args().launcher, Path(folder))
    for program, calls in found.items():
        print(program, *calls, sep="\n    ")
    every = [call for calls in found.values() for call in calls]
    print(f"{len(every)} calls in {len({call.split()[0] for call in every})} files")


if __name__ == "__main__":
    main()
