"""The demo model with LoRA adapters: each request has the text of its own adapter, whatever runs beside it, and goes on
with that adapter when its shard is killed."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import processes
import pytest
from adapter_tools import sizes_of, some, write_adapter
from asks import WORDS, Ask, plain
from server_process import ServerProcess
from streams import StreamClients, compare, run_streams

from text_generation_common.model_files import demo_directory

# Few tokens in a step make the warm-up shorter.
MEMORY = [
    *("--max-batch-total-tokens", "8192", "--max-batch-prefill-tokens", "256"),
    *("--max-concurrent-requests", "32"),
]
NEW_TOKENS = 60
NAMES = ("a", "b", None)


def asking(number: int) -> Ask:
    ask = plain(" ".join(WORDS[:12]), number if number % 2 else None, NEW_TOKENS)
    name = NAMES[number % 3]
    parameters = ask.body["parameters"] | ({} if name is None else {"adapter_id": name})
    return replace(ask, body=ask.body | {"parameters": parameters})


def listed(folder: Path) -> str:
    sizes = sizes_of(demo_directory())
    one, other = write_adapter(folder / "a", sizes, 4, seed=1), write_adapter(folder / "b", some(sizes, 3), 8, seed=2)
    return f"{one},{other}"


FLAGS = (
    pytest.param(["--max-loras", "1", "--num-shard", "2"], id="one slot, two shards"),
    pytest.param(["--num-shard", "2"], id="two shards", marks=pytest.mark.slow),
    pytest.param(["--max-loras", "1", "--replicas", "2"], id="one slot, replicas", marks=pytest.mark.slow),
    pytest.param(["--replicas", "2"], id="replicas", marks=pytest.mark.slow),
    pytest.param([], id="one shard", marks=pytest.mark.slow),
    pytest.param(["--max-loras", "1"], id="one slot", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("flags", FLAGS)
def test_texts_of_adapters_are_the_same_alone_in_a_crowd_and_after_a_killed_shard(
    flags: list[str], tmp_path: Path
) -> None:
    asks = [asking(number) for number in range(6)]
    adapters = ["--lora-adapters", listed(tmp_path)]
    with ServerProcess("--dtype", "float32", *adapters, *flags, *MEMORY) as server:
        alone, _ = run_streams(server.url, asks, 1)
        assert compare(alone, alone).failures() == []
        texts = [stream.outcome[-1] for stream in alone]
        assert len(set(texts[:3])) == 3 and len(set(texts)) == 6
        has_replicas = "--replicas" in flags
        shards = processes.shards_of_replicas(server.pid) if has_replicas else processes.shards(server.pid)
        shard = next(iter(shards.values()))

        async def kill(clients: StreamClients) -> float:
            await clients.wait_for_tokens(len(asks) * NEW_TOKENS // 4)
            shard.kill()
            return time.time()

        streams, killed_s = run_streams(server.url, asks, len(asks), kill)
        assert killed_s is not None and compare(alone, streams).failures() == []
        if "--num-shard" in flags:
            check_routes(server.url)


def check_routes(url: str) -> None:
    models = httpx.get(f"{url}/v1/models").json()["data"]
    assert [model["id"] for model in models][1:] == ["a", "b"]

    def chat(model: str) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": " ".join(WORDS)}], "max_tokens": 8, "seed": 1}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

    first, again, other, served = (chat(name).json() for name in ("a", "a", "b", "tgi"))
    texts = [answer["choices"][0]["message"]["content"] for answer in (first, again, other, served)]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, again, other, served)]
    # The first token of every prompt is the same, and earlier requests of each adapter have computed it.
    assert cached[1] > 4 and max(cached[0], *cached[2:]) <= 1
    assert chat("c").status_code == 404
    script = Path(__file__).parent / "clients/check_adapters.py"
    subprocess.run([sys.executable, script, url, "a", "text_generation"], check=True, timeout=120)
    page = httpx.get(f"{url}/metrics").text
    assert 'tgi_adapter_texts{adapter="a"}' in page and 'tgi_adapter_output_tokens{adapter="b"}' in page
    refused = httpx.post(f"{url}/generate", json={"inputs": "x", "parameters": {"adapter_id": "c"}})
    assert refused.status_code == 422 and "`adapter_id` must be one of the server's adapters (a, b)" in refused.text
