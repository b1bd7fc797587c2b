"""The demo model, with LoRA adapters that are loaded, replaced and unloaded while requests run, and processes killed
meanwhile: every request has the text of the adapter that it began with."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import processes
import pytest
from adapter_tools import sizes_of, write_adapter
from asks import WORDS
from server_process import ServerProcess, wait_until

from text_generation_common.model_files import demo_directory

KEY = {"Authorization": "Bearer an-administrator"}
MEMORY = ["--max-batch-total-tokens", "8192", "--max-concurrent-requests", "32"]
LOADING = ["--admin-api-key", "an-administrator", "--max-loras", "2", "--max-lora-rank", "8"]
LONG, LIMIT_S = 200, 600.0
FLAGS = (
    pytest.param([], id="one process", marks=pytest.mark.slow),
    pytest.param(["--replicas", "2", "--api-workers", "2"], id="replicas and fronts"),
    pytest.param(["--num-shard", "2"], id="two shards", marks=pytest.mark.slow),
)


def body_of(name: str | None, tokens: int) -> dict[str, Any]:
    named = {} if name is None else {"adapter_id": name}
    asked = {"max_new_tokens": tokens, "ignore_eos_token": True, "do_sample": False, "decoder_input_details": False}
    return {"inputs": " ".join(WORDS[:12]), "parameters": asked | named}


def text(url: str, name: str | None, tokens: int = LONG) -> str:
    answer = httpx.post(f"{url}/generate", json=body_of(name, tokens), timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["generated_text"])


@contextmanager
def running(url: str, name: str) -> Iterator[Iterator[str]]:
    """A stream that has begun. Its last event has the whole text."""
    with httpx.stream("POST", f"{url}/generate_stream", json=body_of(name, LONG), timeout=LIMIT_S) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data:"))
        next(lines)
        yield lines


def text_of(lines: Iterator[str]) -> str:
    *_, last = lines
    return str(json.loads(last.removeprefix("data:"))["generated_text"])


def change(url: str, what: str, key: dict[str, str] = KEY, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/{what}_lora_adapter", json=body, headers=key, timeout=LIMIT_S)


def load(url: str, name: str, folder: Path) -> httpx.Response:
    return change(url, "load", lora_name=name, lora_path=str(folder))


@pytest.mark.parametrize("flags", FLAGS)
def test_requests_keep_the_adapter_that_they_began_with(flags: list[str], tmp_path: Path) -> None:
    allowed, sizes = tmp_path / "allowed", sizes_of(demo_directory())
    one, other = (
        Path(write_adapter(allowed / name, sizes, 4 + seed, seed=seed).path) for seed, name in enumerate("ab")
    )
    with ServerProcess("--dtype", "float32", "--lora-dirs", str(allowed), *LOADING, *flags, *MEMORY) as server:
        url = server.url
        plain = text(url, None)
        assert load(url, "x", one).text == "Success: LoRA adapter 'x' added successfully."
        first = text(url, "x")
        with running(url, "x") as lines:
            assert load(url, "x", other).status_code == 200
            second, short = text(url, "x"), text(url, "x", 20)
            assert text_of(lines) == first
        assert len({plain, first, second}) == 3
        assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]][1:] == ["x"]
        has_replicas = "--replicas" in flags
        found = (processes.shards_of_replicas if has_replicas else processes.shards)(server.pid)
        with running(url, "x") as lines:
            for shard in found.values() if has_replicas else [next(iter(found.values()))]:
                shard.kill()
            assert text_of(lines) == second
        # What starts again has the list.
        if has_replicas:
            for engine in processes.engines(server.pid).values():
                engine.kill()
            processes.routers(server.pid)[0].kill()
        else:
            old = processes.router(server.pid)
            old.kill()
            wait_until(lambda: not old.is_running(), LIMIT_S, "the end of the router")
        wait_until(lambda: is_healthy(url), LIMIT_S, "a new router")
        assert text(url, "x") == second and all(text(url, "x", 20) == short for _ in range(3))
        with ThreadPoolExecutor(1) as pool, running(url, "x") as lines:
            unloading = pool.submit(change, url, "unload", lora_name="x")
            wait_until(lambda: not names_of(url), LIMIT_S, "the end of the name")
            assert text_of(lines) == second
            assert unloading.result().text == "Success: LoRA adapter 'x' removed successfully."
        refused = httpx.post(f"{url}/v1/completions", json={"model": "x", "prompt": "Hi"})
        assert refused.status_code == 404
        assert load(url, "x", one).status_code == 200 and text(url, "x") == first


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=LIMIT_S).status_code == 200
    except httpx.TransportError:
        return False


def names_of(url: str) -> list[str]:
    return [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"][1:]]


def test_files_that_may_not_be_loaded_are_refused_in_one_line_and_nothing_changes(tmp_path: Path) -> None:
    allowed, sizes = tmp_path / "allowed", sizes_of(demo_directory())
    outside = Path(write_adapter(tmp_path / "outside", sizes, 4, seed=1).path)
    good = Path(write_adapter(allowed / "good", sizes, 4, seed=2).path)
    large = Path(write_adapter(allowed / "large", sizes, 9, seed=3).path)
    lame = Path(write_adapter(allowed / "lame", sizes, 4, seed=4, r=10**9).path)
    bomb = Path(write_adapter(allowed / "bomb", sizes, 4, seed=5).path)
    (bomb / "adapter_model.safetensors").write_bytes((10 * 2**20).to_bytes(8, "little") + b"[" * (10 * 2**20))
    swapped = Path(write_adapter(allowed / "swapped", sizes, 4, seed=6).path)
    file = swapped / "adapter_model.safetensors"
    file.unlink()
    file.symlink_to(outside / file.name)
    (allowed / "link").symlink_to(outside)
    with ServerProcess("--dtype", "float32", "--lora-dirs", str(allowed), *LOADING, *MEMORY) as server:
        url = server.url
        plain = text(url, None, 20)
        assert change(url, "load", {}, lora_name="x", lora_path=str(good)).status_code == 401
        wrong = {"Authorization": "Bearer an-administrator2"}
        assert change(url, "unload", wrong, lora_name="x").status_code == 401
        for folder, says in (
            (outside, "is not a path within the folders of --lora-dirs"),
            (allowed / "link", "is not a path within the folders of --lora-dirs"),
            (swapped, "is a link to a file outside of the folders"),
            (large, "a rank of at most 8 is served"),
            (lame, "a rank of at most 8 is served"),
            (bomb, "has a header of more than"),
        ):
            answer = load(url, "x", folder)
            assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
            assert "\n" not in answer.json()["error"]["message"]
        assert names_of(url) == [] and text(url, None, 20) == plain
        assert load(url, "x", good).status_code == 200 and text(url, "x", 20) != plain
        # A file that is changed after it was loaded is not read again for another adapter.
        weights = good / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x80\x3f")
        assert load(url, "y", good).status_code == 200
        shard = processes.shards(server.pid)[0]
        with_adapter = text(url, "x", 20)
        shard.kill()  # by SIGKILL: the next shard has the slots of this one
        assert text(url, "x", 20) == with_adapter
        processes.shards(server.pid)[0].send_signal(signal.SIGSEGV)
        lost = httpx.post(f"{url}/generate", json=body_of("x", 20), timeout=LIMIT_S)
        assert lost.status_code == 424 and "have changed since they were checked" in lost.text
        assert text(url, None, 20) == plain and text(url, "y", 20) != plain
