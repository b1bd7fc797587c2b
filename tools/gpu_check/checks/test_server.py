"""Whole servers: whether they answer what transformers computes, and how fast a Llama of 8 billion random weights is.

The targets are in `report.py`. Only those decode steps are measured during which all streams decode and no prompt is
computed.
"""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_check.device import GPU, SHAPE, Measured
from tokenizers import Tokenizer

from text_generation_benchmark.checkpoint import write_without_weights
from text_generation_benchmark.load import GenerateStream, LoadResult
from text_generation_benchmark.metrics import metric
from text_generation_benchmark.process import ServerCommand, free_port, get, request, running
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.roofline import Ceilings, step_parts
from text_generation_benchmark.workload import Run, Workload, loads_on
from text_generation_common.model_files import demo_directory
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config

START_S, STOP_S = 100 if GPU else 1000, 10  # a rehearsal may run beside much other work
LAUNCHER = """import pathlib, sys, text_generation_launcher.cli as launcher
launcher.main(sys.argv[2:], [pathlib.Path(sys.argv[1])])"""
LIFE_S = START_S + 400  # the server ends then, whatever has become of the process that started it
PROMPTS, NEW_TOKENS = (3, 40, 300, 700), 32  # numbers of tokens; each prompt is asked twice, and all at once
# Without the ratio, requests join in groups, and only the measured run has all 256 rows together, graphs unrecorded.
FLAGS = ["--load-format", "dummy", "--dtype", "bfloat16", "--waiting-served-ratio", "0"]
if GPU:
    FLAGS += ["--max-input-tokens", "4096", "--max-total-tokens", "4608", "--max-batch-prefill-tokens", "4096"]
# In the middle of the measured steps, the context of 64 and of 256 rows is about 1,000 tokens long.
DECODES = [
    Workload(1, 256, 512), Workload(64, 808, 384), Workload(64, 808, 384, is_sampled=True), Workload(256, 840, 320),
] if GPU else [Workload(4, 32, 900)]  # fmt: skip
PROMPT, CROWD = (4096, Workload(64, 808, 384)) if GPU else (256, Workload(2, 32, 900))
RUNS = 3
# A rehearsal needs few of the token slots that the memory of its machine would be enough for.
SLOTS: tuple[str, ...] = () if GPU else ("--max-batch-total-tokens", "32768")

# A rehearsal shows that the check runs: with one server. Each of the others takes 10 s.
FURTHER = () if GPU else pytest.mark.slow
pytestmark = pytest.mark.limit(150)  # each test may be a call's first, which starts the server


@contextmanager
def served(model: Path, folder: Path, *flags: str) -> Iterator[int]:
    """A server's port. Scripts replace the programs that the launcher starts, so nothing has to be installed."""
    programs = folder / "programs"
    programs.mkdir()
    for part in ("router", "server"):
        script = programs / f"text-generation-{part}"
        script.write_text(f"#!{sys.executable}\nfrom text_generation_{part}.cli import main\n\nmain()\n")
        script.chmod(0o755)
    port = free_port()
    command = [
        *("timeout", "--foreground", "--kill-after", "15", str(LIFE_S), sys.executable, "-c", LAUNCHER, str(programs)),
        *("--model-id", str(model), "--hostname", "127.0.0.1", "--port", str(port), "--num-shard", "1"),
        *("--shard-uds-path", f"{folder}/shard", "--max-concurrent-requests", "300"),
        *("--graceful-termination-timeout", "1", *SLOTS, *flags),
    ]
    try:
        with running(ServerCommand("the server", command, port, "/health", START_S), folder / "log", STOP_S):
            yield port
    finally:
        print((folder / "log").read_text(errors="replace")[-4000:])  # pytest shows it if a test fails


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [pytest.param("--dtype float32", 2e-3, marks=FURTHER), pytest.param("--dtype bfloat16", 0.1, marks=FURTHER),
     pytest.param("--dtype bfloat16 --kv-cache-dtype fp8_e4m3fn", 0.5, marks=FURTHER)],
)  # fmt: skip
def test_the_demo_model_answers_as_transformers_computes(
    flags: str, tolerance: float, tmp_path: Path, measured: Measured
) -> None:
    """Greedy: each token is transformers' best in float32 or nearly, and its log-probability is transformers'."""
    from transformers import AutoModelForCausalLM

    model, prompts = demo_directory(), Prompts(demo_directory())
    asked = [text for tokens in PROMPTS for text in prompts.make(2, tokens)]
    with ThreadPoolExecutor(len(asked)) as pool, served(model, tmp_path, *flags.split()) as port:
        answers = list(pool.map(partial(answer, port), asked))
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer, off, behind = Tokenizer.from_file(str(model / "tokenizer.json")), 0.0, 0.0
    for text, tokens in zip(asked, answers, strict=True):
        assert len(tokens) == NEW_TOKENS
        ids, new = tokenizer.encode(text).ids, torch.tensor([token["id"] for token in tokens])
        logits = expected(torch.tensor([ids + new.tolist()])).logits[0, len(ids) - 1 : -1]
        logprobs = logits.log_softmax(dim=1)
        chosen = logprobs.gather(1, new.unsqueeze(1)).squeeze(1)
        off = max(off, float((chosen - torch.tensor([token["logprob"] for token in tokens])).abs().max()))
        behind = max(behind, float((logprobs.max(dim=1).values - chosen).max()))
    cells = {"log-probabilities, at most apart": f"{off:.2g}", "chosen token, at most behind the best": f"{behind:.2g}"}
    measured("Answers of the demo model beside transformers in float32", {"server": flags, **cells})
    assert off <= tolerance and behind <= tolerance


def answer(port: int, text: str) -> list[dict[str, Any]]:
    parameters = {"max_new_tokens": NEW_TOKENS, "details": True, "ignore_eos_token": True}
    body = json.dumps({"inputs": text, "parameters": parameters}).encode()
    return list(json.loads(request(port, "/generate", body))["details"]["tokens"])


@dataclass(frozen=True, slots=True)
class Llama:
    port: int
    config: ModelConfig
    run: Run


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    folder = tmp_path_factory.mktemp("llama")
    write_without_weights(folder / "model", SHAPE)
    with served(folder / "model", folder, *FLAGS) as port:
        run = loads_on(port, GenerateStream(), Prompts(folder / "model"))
        yield Llama(port, read_config(folder / "model"), run)


@pytest.mark.parametrize("load", DECODES, ids=lambda load: f"{load.concurrency}-{'draws' * load.is_sampled}")
def test_decode_steps(load: Workload, llama: Llama, ceilings: Ceilings, measured: Measured) -> None:
    # A short run comes first, until all streams decode together. After it everything is compiled and recorded.
    llama.run(Workload(load.concurrency, load.input_tokens, load.new_tokens // 4, load.is_sampled))
    result, pages = watch(llama, load)
    cells, figures = step_figures(pages, load, llama.config, ceilings)
    clients = {
        "tokens/s": f"{result.tokens_per_s:.0f}",
        "ms per token at the client": f"{1e3 * result.per_token_s:.3f}",
    }
    measured("Decode steps", cells | clients | {"99% of gaps ≤ ms": f"{1e3 * result.gap_s(0.99):.2f}"}, **figures)


def test_prefill(llama: Llama, ceilings: Ceilings, measured: Measured) -> None:
    runs = []
    for _ in range(1 + RUNS):  # one more, because the first run warms up
        before = Page(get(llama.port, "/metrics"))
        first_s = llama.run(Workload(1, PROMPT, 1)).first_token_s
        runs.append((Page(get(llama.port, "/metrics")).prefill_s - before.prefill_s, first_s))
    device_s, client_s = sorted(runs[1:])[RUNS // 2]
    rate = sum(part.flops for part in step_parts(llama.config, 1, PROMPT, PROMPT)) / device_s
    cells = {"tokens": str(PROMPT), "device ms": f"{1e3 * device_s:.2f}", "at the client, ms": f"{1e3 * client_s:.2f}"}
    cells |= {"TFLOP/s": f"{rate / 1e12:.1f}", "of the products' ceiling": f"{rate / ceilings.flops:.1%}"}
    measured("Prefill", cells, prefill=rate / ceilings.flops)


@pytest.mark.parametrize("tokens", [64, 4096] if GPU else [16])
def test_a_prompt_beside_streams(tokens: int, llama: Llama, measured: Measured) -> None:
    """Mixed steps: the time to the first token of prompts, one after the other, and what the streams notice."""
    with ThreadPoolExecutor(1) as executor:
        load = executor.submit(llama.run, CROWD)
        while not load.done() and not Page(get(llama.port, "/metrics")).is_decoding(CROWD.concurrency):
            time.sleep(0.01)
        waits = sorted(llama.run(Workload(1, tokens, 1)).first_token_s for _ in range(RUNS))
        assert not load.done(), "the streams had ended before the last prompt"
        gap_s = load.result().gap_s(0.99)
    cells = {"streams": str(CROWD.concurrency), "prompt": f"{tokens} tokens"}
    cells |= {"first token, ms": f"{1e3 * waits[RUNS // 2]:.1f}", "the streams' 99% of gaps ≤ ms": f"{1e3 * gap_s:.2f}"}
    measured("A prompt beside streams", cells)


@dataclass(frozen=True, slots=True)
class Page:
    """The server's metrics at one point in time."""

    text: str
    at_s: float = field(default_factory=time.perf_counter)

    def value(self, series: str) -> float:
        return metric(self.text, series)

    @property
    def prefills(self) -> tuple[float, float]:
        """Number of prefills (sent to the shards, answered by them)."""
        sent, answered = (f'tgi_batch_inference_{name}{{method="prefill"}}' for name in ("count", "success"))
        return self.value(sent), self.value(answered)

    @property
    def prefill_s(self) -> float:
        return self.value('tgi_batch_forward_duration_sum{method="prefill"}')

    def is_decoding(self, streams: int) -> bool:
        sent, answered = self.prefills
        return sent == answered and self.value("tgi_batch_current_size") == streams


def watch(llama: Llama, load: Workload) -> tuple[LoadResult, list[Page]]:
    """The metrics, read again and again while the load runs."""
    pages = []
    with ThreadPoolExecutor(1) as executor:
        running_load = executor.submit(llama.run, load)
        while not running_load.done():
            pages.append(Page(get(llama.port, "/metrics")))
            time.sleep(0.1)
        return running_load.result(), pages


def step_figures(
    pages: list[Page], load: Workload, config: ModelConfig, ceilings: Ceilings
) -> tuple[dict[str, str], dict[str, float]]:
    """Cells and figures of the steps between the first and the last page on which all streams decode and the last
    prompt has been computed."""
    steady = [page for page in pages if page.is_decoding(load.concurrency)]
    steady = [page for page in steady if page.prefills == steady[-1].prefills]

    def moved(series: str) -> float:
        return steady[-1].value(series) - steady[0].value(series)

    assert len(steady) > 1 and moved("tgi_shard_decode_steps"), (
        "all streams never decoded together: ask for more tokens"
    )
    steps = moved("tgi_shard_decode_steps")
    step_s = (steady[-1].at_s - steady[0].at_s) / steps
    device_s = moved('tgi_batch_forward_duration_sum{method="decode"}') / steps
    context = (steady[0].value("tgi_slots_used") + steady[-1].value("tgi_slots_used")) / 2 / load.concurrency
    weights, attention, head, _ = step_parts(config, load.concurrency, 1, round(context))
    share = (weights.bytes + attention.bytes + head.bytes) / step_s / ceilings.bandwidth
    cells = {
        "streams": f"{load.concurrency}{', top-p' * load.is_sampled}", "context": f"{context:.0f}",
        "steps": f"{steps:.0f}", "step ms": f"{1e3 * step_s:.3f}", "device ms": f"{1e3 * device_s:.3f}",
        "of the memory's ceiling": f"{share:.1%}", "outside the device": f"{1 - device_s / step_s:.1%}",
    }  # fmt: skip
    if load.is_sampled:
        return cells, {}
    return cells, {f"decode at {load.concurrency}": share, f"outside at {load.concurrency}": 1 - device_s / step_s}
