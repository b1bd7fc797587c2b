"""A whole server whose model transformers computes: the same texts as from our own model, and as from transformers."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from calls import DEMO_MODEL, NEAR_TIE, at_once, tokenizer
from demo_model.corpus import SECOND_MIX, World, story_request, sum_question
from fallback_checkpoints import expected_logprobs, make_model
from scenarios import restarts
from server_process import ServerProcess
from streams import asks, run_streams
from test_demo_model import ask

FLAGS = ("--dtype", "float32", "--max-total-tokens", "512", "--max-batch-total-tokens", "4096", "--testing")


def test_the_demo_model_computed_by_transformers_gives_the_same_texts(server: ServerProcess) -> None:
    world = World(random.Random(12), True, SECOND_MIX)
    questions = [kind(world)[0] for kind in (sum_question, story_request) for _ in range(3)]
    ours = at_once(server.url, *(ask(question, 60) for question in questions))
    with ServerProcess(*FLAGS, environ={"WITH_FAMILIES": "0"}) as other:
        assert at_once(other.url, *(ask(question, 60) for question in questions)) == ours
        assert "model type llama is not one of the server's own" in other.log()


@pytest.mark.models
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "gpt_oss", "olmo3", "qwen2_moe", "deepseek_v3"])
def test_streams_are_those_of_transformers_though_the_shard_is_killed(tmp_path: Path, model_type: str) -> None:
    model = make_model(tmp_path, model_type, vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    asked = asks(12, 24)
    environ = {"WITH_FAMILIES": "0", "FAILPOINTS": "shard.decode[epoch=1]:kill@15"}
    with ServerProcess("--model-id", str(tmp_path), *FLAGS, environ=environ) as server:
        killed, _ = run_streams(server.url, asked, 8)
        assert restarts(server) == 1
        whole, _ = run_streams(server.url, asked, 8)
    assert [(stream.error, stream.ids) for stream in killed] == [("", stream.ids) for stream in whole]
    for one, stream in zip(asked, killed, strict=True):
        if one.seed is None:
            prompt, ids = torch.tensor(tokenizer().encode(one.prompt).ids), list(stream.ids)
            expected = expected_logprobs(model, prompt, ids)
            chosen = expected.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
            assert (expected.max(dim=1).values - chosen).max() <= NEAR_TIE
