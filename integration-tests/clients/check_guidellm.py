"""Runs guidellm's benchmark against the server at argv[1], with the tokenizer of the folder argv[2]."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Checks

REQUESTS, NEW_TOKENS = 5, 8


def measure(url: str, tokenizer: str, request_format: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={url},model=tgi,request_format={request_format}"]
        command += ["--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--output", f"kind=json,path={result}"]
        command += ["--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={NEW_TOKENS}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and result.exists(), (done.stdout + done.stderr)[-400:]
        (benchmark,) = json.loads(result.read_text())["benchmarks"]
    requests = benchmark["requests"]
    counts = {state: len(found or ()) for state, found in requests.items()}
    assert counts == {"successful": REQUESTS, "errored": 0, "incomplete": 0} | {"total": counts.get("total")}, counts


def main(url: str, tokenizer: str) -> None:
    checks = Checks("guidellm")
    for request_format in ("/v1/completions", "/v1/chat/completions"):
        checks.run(request_format, lambda request_format=request_format: measure(url, tokenizer, request_format))
    checks.exit()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
