"""Two and four shards give the same text as one shard: on a model with at least one KV head for each shard, and on a
model with fewer."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calls import DEMO_MODEL, NEAR_TIE, at_once, distance_to_greedy, generate, token_ids, tokenizer
from logs import mib_read
from scale import SHORT

from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.shapes import LlamaShape

PROMPTS = 30
NEW_TOKENS = 32
WORDS = "fox, lamp. river and Tarlo was 27 years old so Write JSON list + story".split()
FEW_HEADS = LlamaShape(hidden=256, intermediate=516, layers=3, heads=8, kv_heads=1, vocabulary=2048, max_positions=512)


def prompts() -> list[str]:
    rng = random.Random(3)
    return [" ".join(rng.choice(WORDS) for _ in range(3 + 3 * i)) for i in range(PROMPTS)]


def texts_of(model: Path, num_shard: int) -> tuple[list[list[int]], dict[int, float]]:
    """Runs all prompts at once. Returns (token ids of each prompt's greedy text, MiB that each shard has read)."""
    with SHORT.server(num_shard, "--model-id", str(model)) as server:
        calls = [generate(text, max_new_tokens=NEW_TOKENS, ignore_eos_token=True) for text in prompts()]
        return [token_ids(answer) for answer in at_once(server.url, *calls)], mib_read(server.log())


@pytest.fixture(scope="module")
def few_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few") / "heads"
    write_checkpoint(folder, FEW_HEADS, torch.float32)
    return folder


@pytest.fixture(scope="module")
def alone(few_heads: Path) -> Callable[[Path], tuple[list[list[int]], dict[int, float]]]:
    """The result of `texts_of` with one shard, computed once for each model."""
    known: dict[Path, tuple[list[list[int]], dict[int, float]]] = {}

    def ask(model: Path) -> tuple[list[list[int]], dict[int, float]]:
        if model not in known:
            known[model] = texts_of(model, 1)
        return known[model]

    return ask


@pytest.mark.parametrize(
    ("name", "num_shard"),
    [
        ("few heads", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("few heads", 4), ("demo", 2), ("demo", 4))),
    ],
)
def test_the_greedy_text_is_that_of_one_shard(
    few_heads: Path, alone: Callable[[Path], tuple[list[list[int]], dict[int, float]]], name: str, num_shard: int
) -> None:
    model = DEMO_MODEL if name == "demo" else few_heads
    expected, read_alone = alone(model)
    texts, read = texts_of(model, num_shard)
    differing = [i for i in range(PROMPTS) if texts[i] != expected[i]]
    near_ties = 0
    for text, ids in zip(prompts(), texts, strict=True):
        assert len(ids) == NEW_TOKENS
        distances = distance_to_greedy(tokenizer().encode_batch([text])[0].ids, ids, model)
        assert distances.max() <= NEAR_TIE, f"{len(text)} characters: not the choice of one shard"
        near_ties += int((distances > 0).sum())
    # A text may differ from the text of one shard only where the scores of two tokens were nearly equal.
    assert len(differing) <= near_ties
    print(f"{name}, {num_shard} shards: {near_ties} near-ties, {len(differing)} other texts of {PROMPTS}")
    assert_each_reads_its_part(read, read_alone[0], num_shard)


def assert_each_reads_its_part(read: dict[int, float], alone_mib: float, num_shard: int) -> None:
    """Each of N shards reads 1 / N of the tensors, plus tensors that all shards need: norms, and KV heads if there are
    fewer KV heads than shards."""
    assert sorted(read) == list(range(num_shard))
    assert all(mib < alone_mib / num_shard * 1.25 for mib in read.values()), (read, alone_mib)
    assert sum(read.values()) >= alone_mib * 0.99, (read, alone_mib)
