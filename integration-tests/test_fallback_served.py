"""Whole servers whose models transformers computes, for families of the server's own too: streams at once, with prompts
beside texts in the same steps, and steps that fail in mid-text. The same texts as from our own model, and as from
transformers."""

import random
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from asks import Ask, asks
from calls import DEMO_MODEL, NEAR_TIE, at_once, metric, tokenizer
from demo_model.corpus import SECOND_MIX, World, story_request, sum_question
from fallback_checkpoints import expected_logprobs, make_model
from faults import restarts
from server_process import ServerProcess
from streams import StreamAnswer, run_streams
from test_demo_model import ask

# Few tokens of prompts for a step, so that long prompts come in chunks beside the rows of other texts.
FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "256", "--max-batch-total-tokens", "4096"),
    *("--max-batch-prefill-tokens", "64", "--testing"),
)
# Steps that fail with all of their rows: one with a part of a prompt beside texts, one of texts alone.
FAULTS = "shard.prefill[epoch=1]:raise@3;shard.decode[epoch=1]:raise@12"
KILL = "shard.decode[epoch=1]:kill@18"
STREAMS, NEW_TOKENS, AT_ONCE = 12, 24, 8
# Servers of a group are started together, because they need most of their time to load transformers.
KILLED = ("qwen3 gemma2 gpt_oss", "olmo3 qwen2_moe deepseek_v3")
FAILED = (
    *("llama mistral mixtral", "qwen2 qwen3_moe gemma", "gemma3_text phi phi3", "gpt2 gpt_neox starcoder2"),
    *("cohere cohere2 olmo2", "granite granitemoe smollm3", "opt gpt_bigcode glm4", "glm4_moe exaone4 seed_oss"),
    *("olmoe phimoe ministral", "ministral3 nemotron ernie4_5_moe"),
)
GROUPS = {model_type: group for group in (*KILLED, *FAILED) for model_type in group.split()}


def test_the_demo_model_computed_by_transformers_gives_the_same_texts(server: ServerProcess) -> None:
    world = World(random.Random(12), True, SECOND_MIX)
    questions = [kind(world)[0] for kind in (sum_question, story_request) for _ in range(3)]
    ours = at_once(server.url, *(ask(question, 60) for question in questions))
    with ServerProcess(*FLAGS, environ={"WITH_FAMILIES": "0", "FAILPOINTS": FAULTS}) as other:
        assert at_once(other.url, *(ask(question, 60) for question in questions)) == ours
        assert "model type llama is not one of the server's own: transformers" in other.log()
        assert other.log().count("fault injected") == 2


class Servers:
    """The servers of one group. They end when those of another group are asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._started: dict[str, tuple[ServerProcess, torch.nn.Module]] = {}

    def of(self, model_type: str) -> tuple[ServerProcess, torch.nn.Module]:
        """The server of a model, and transformers' own model."""
        if model_type not in self._started:
            self.end()
            self._started = {name: self._start(name) for name in GROUPS[model_type].split()}
        server, model = self._started[model_type]
        server.wait_until_ready()
        return server, model

    def end(self) -> None:
        for server, _ in self._started.values():
            server.running.terminate()
        self._stack.close()

    def _start(self, model_type: str) -> tuple[ServerProcess, torch.nn.Module]:
        path = self._folder / model_type
        model = make_model(path, model_type, vocab_size=2048)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_MODEL / name, path)
        environ = {"WITH_FAMILIES": "0", "FAILPOINTS": faults(model_type)}
        server = ServerProcess("--model-id", str(path), *FLAGS, environ=environ)
        server.start()
        self._stack.push(server)
        return server, model


def faults(model_type: str) -> str:
    return f"{FAULTS};{KILL}" if GROUPS[model_type] in KILLED else FAULTS


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        servers = Servers(tmp_path_factory.mktemp("models"), stack)
        yield servers
        servers.end()


@pytest.mark.models
@pytest.mark.parametrize("model_type", GROUPS)
def test_streams_are_those_of_transformers_though_steps_fail(servers: Servers, model_type: str) -> None:
    server, model = servers.of(model_type)
    asked = asks(STREAMS, NEW_TOKENS)
    disturbed, _ = run_streams(server.url, asked, AT_ONCE)
    # The launcher repeats the last lines of a shard that was killed.
    assert len(set(re.findall(r"fault injected: (\S+ \w+ at pass \d+)", server.log()))) == faults(model_type).count(":")
    assert restarts(server) == faults(model_type).count("kill")
    assert metric(server.url, "tgi_request_resumes") >= AT_ONCE
    whole, _ = run_streams(server.url, asked, AT_ONCE)
    assert [(stream.error, stream.ids) for stream in disturbed] == [("", stream.ids) for stream in whole]
    for one, stream in zip(asked, disturbed, strict=True):
        if "seed" not in one.body["parameters"]:
            assert distance(model, one, stream) <= NEAR_TIE


def distance(model: torch.nn.Module, asked: Ask, stream: StreamAnswer) -> float:
    """The log-probability of transformers' best token less that of the stream's, where it is largest."""
    prompt, ids = torch.tensor(tokenizer().encode(asked.body["inputs"]).ids), list(stream.ids)
    expected = expected_logprobs(model, prompt, ids)
    chosen = expected.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    return float((expected.max(dim=1).values - chosen).max())
