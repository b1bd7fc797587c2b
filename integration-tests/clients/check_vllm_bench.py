"""Runs `vllm bench serve`, of the program argv[3], against the server at argv[1], with the tokenizer of argv[2]."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Checks

REQUESTS, NEW_TOKENS = 8, 8


def measure(url: str, tokenizer: str, program: str, *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "bench", "serve", "--base-url", url, "--model", tokenizer, "--tokenizer", tokenizer]
        command += "--served-model-name tgi --dataset-name random --random-input-len 16 --ignore-eos".split()
        command += ["--random-output-len", str(NEW_TOKENS), "--num-prompts", str(REQUESTS), "--disable-tqdm"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-400:]
        result = json.loads((Path(folder) / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0), result
    assert result["total_output_tokens"] == REQUESTS * NEW_TOKENS and result["mean_ttft_ms"] > 0, result


def main(*arguments: str) -> None:
    checks = Checks("vllm bench serve")
    checks.run("completions", lambda: measure(*arguments, "--backend", "openai"))
    chats = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
    checks.run("chats", lambda: measure(*arguments, *chats))
    checks.exit()


if __name__ == "__main__":
    main(*sys.argv[1:4])
