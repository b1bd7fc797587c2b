"""Live replicas with pretended shards: the words of chats, and that every answer of a small load has its tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import uvloop
from tokenizers import Tokenizer

from text_generation_benchmark.live.processes import LiveProcesses
from text_generation_benchmark.live.shard import TimedRunner
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.replicas.balancing import COST, LOAD, SLOTS, ChatWords, play_chats
from text_generation_benchmark.replicas.chats import Chats
from text_generation_benchmark.replicas.throughput import Throughput, as_markdown
from text_generation_benchmark.simulation.cost import SimulatedModel
from text_generation_common.model_files import demo_directory

FAST = SimulatedModel("fast", replace(COST, constant_s=0.001, prompt_token_s=0.0), SLOTS, 0.0, "invented")


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(demo_directory())


def encoded(text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(demo_directory() / "tokenizer.json")).encode(text).ids
    return ids


def test_a_turn_s_words_are_as_many_tokens_and_its_next_turn_begins_with_them_and_the_answer(prompts: Prompts) -> None:
    chats, words = Chats(replace(LOAD, num_chats=1), 0), ChatWords(prompts, 0)
    before = chats.next()
    chats.answered(before)
    after = chats.next()
    first, second = (encoded(words.text(turn.prompt.tuple)) for turn in (before, after))
    added = len(encoded(""))
    assert len(first) == len(before.prompt) + added and len(second) == len(after.prompt) + added
    answer = encoded(prompts.answer)[added:] * before.output_tokens
    assert second[: len(first) + len(answer)] == first + answer


def test_texts_that_share_nothing_have_different_words_and_so_has_each_salt(prompts: Prompts) -> None:
    chats = Chats(replace(LOAD, shares=False), 0)
    turns = [chats.next() for _ in range(50)]
    for salt in (0, 1):
        words = ChatWords(prompts, salt)
        assert len({words.text(turn.prompt.tuple[:16]) for turn in turns}) == 50
    assert ChatWords(prompts, 0).text(turns[0].prompt.tuple) != ChatWords(prompts, 1).text(turns[0].prompt.tuple)


def test_a_pretended_shard_refuses_a_cost_of_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="kv_token_s"):
        TimedRunner(replace(COST, kv_token_s=1e-6), SLOTS, [1])


def test_a_live_replica_answers_a_small_load_and_finds_its_chats_in_its_cache(prompts: Prompts, tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    FAST.write(cost)
    load = replace(LOAD, num_systems=1, num_chats=2)
    with (
        LiveProcesses(demo_directory(), are_apart=False) as processes,
        processes.fronts(1, processes.engines(1, str(cost))) as (front,),
    ):
        answers = uvloop.run(play_chats([front.port], load, np.arange(8) * 0.05, ChatWords(prompts, 0), 0))
    assert len(answers) == 8 and sum(answer.cached_tokens for answer in answers) > 4 * load.system_tokens
    assert all(answer.first_s > 0 for answer in answers)


def test_the_table_compares_medians_with_one_replica() -> None:
    measured = [Throughput(count, 2, 100.0, rate, 0.4) for count, rate in ((1, 100), (8, 790), (1, 102), (8, 810))]
    assert "| 8 | 2 | 100 | 800 | 7.92 | 40% |" in as_markdown(measured, 16)
