"""Starts the server of another virtual environment, given as a folder, asks its demo model, and prints the answer.

Run for `make test-wheel` from outside the checkout. The server must not import a module of the checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
from server_process import ServerProcess

PLACE = "import text_generation_server as s, importlib.metadata as m; print(m.version('tgi-py'), s.__path__[0])"


def main(folder: Path) -> None:
    os.environ.pop("PYTHONPATH", None)
    told = subprocess.run([folder / "bin" / "python", "-c", PLACE], capture_output=True, text=True, check=True)
    version, place = told.stdout.split(maxsplit=1)
    assert Path(place.strip()).is_relative_to(folder), f"the server is not the one of the wheel: {place}"
    question = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
    with ServerProcess(launcher=folder / "bin" / "text-generation-launcher") as server:
        info = httpx.get(f"{server.url}/info").raise_for_status().json()
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=question, timeout=60).raise_for_status().json()
    text = answer["choices"][0]["message"]["content"]
    assert info["version"] == version and "42" in text, json.dumps([info, answer])
    print(f"tgi-py {version} from a wheel, {info['model_id']}: {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
