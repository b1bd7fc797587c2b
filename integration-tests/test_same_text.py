"""The demo model's text equals transformers' text, whatever other requests are being served."""

import random
from collections.abc import Callable
from functools import cache
from operator import itemgetter

import httpx
import pytest
from calls import NEAR_TIE, at_once, distance_to_greedy, generate, prompt_logprobs, stream, token_ids, tokenizer
from server_process import ServerProcess

LENGTHS = [1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 34, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 400, 500]
LENGTHS += [511, 512, 513, 600, 640, 700, 767, 768, 800, 850, 900, 950, 1000, 1023, 1024, 1025, 1100, 1150, 1200]
LENGTHS += [1250, 1300, 1350, 1400, 1450, 1500]
NEW_TOKENS = 64
WORDS = "the fox lost a red lamp near river and Tarlo was 27 years old, so what? Write JSON list + story. é😀".split()


def prompt(length: int) -> tuple[str, list[int]]:
    """A text, and its first `length` token ids, which remain when the server truncates the text."""
    rng = random.Random(length)
    text = " ".join(rng.choice(WORDS) for _ in range(length + 5))
    ids = tokenizer().encode_batch([text])[0].ids
    assert len(ids) >= length
    return text, ids[-length:]


def ask(length: int, **parameters: object) -> object:
    options = {"truncate": length, "max_new_tokens": NEW_TOKENS, "ignore_eos_token": True}
    return generate(prompt(length)[0], **{**options, **parameters})


@pytest.fixture(scope="module")
def alone(server: ServerProcess) -> Callable[[int], list[int]]:
    """The text of a prompt of some length, computed alone, once for each length."""
    return cache(lambda length: token_ids(at_once(server.url, ask(length))[0]))


@pytest.mark.parametrize("lengths", [LENGTHS[::2], pytest.param(LENGTHS[1::2], marks=pytest.mark.slow)], ids=len)
def test_greedy_text_equals_transformers_alone_and_sixteen_at_a_time(
    server: ServerProcess, alone: Callable[[int], list[int]], lengths: list[int]
) -> None:
    expected = [alone(length) for length in lengths]
    assert len(lengths) == 25 and all(len(ids) == NEW_TOKENS for ids in expected)
    crowd: list[list[int]] = []
    for first in range(0, len(lengths), 16):
        crowd += map(token_ids, at_once(server.url, *map(ask, lengths[first : first + 16])))
    assert crowd == expected
    near_ties = 0
    for length, ids in zip(lengths, expected, strict=True):
        distances = distance_to_greedy(prompt(length)[1], ids)
        assert distances.max() <= NEAR_TIE, f"prompt of {length} tokens: not transformers' choice"
        near_ties += int((distances > 0).sum())
    print(f"{near_ties} near-ties in {len(lengths) * NEW_TOKENS} tokens")


def test_sixty_four_streams_equal_one_at_a_time_to_the_bit(
    server: ServerProcess, alone: Callable[[int], list[int]]
) -> None:
    short = LENGTHS[:32:2]
    calls = [stream(prompt(n)[0], truncate=n, max_new_tokens=NEW_TOKENS, ignore_eos_token=True) for n in short]
    streams = at_once(server.url, *calls * 4)
    single = [at_once(server.url, call)[0] for call in calls[:8]]
    tokens = [[event["token"]["id"] for event in events] for events in streams]
    assert tokens == [alone(length) for length in short] * 4
    for i, events in enumerate(single):
        assert [e["token"]["logprob"] for e in events] == [e["token"]["logprob"] for e in streams[i]]


def test_the_same_seed_gives_the_same_text_alone_and_in_a_crowd(server: ServerProcess) -> None:
    options = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
    calls = [ask(20 + i, seed=i, **options) for i in range(16)]
    alone = [token_ids(at_once(server.url, call)[0]) for call in calls[:4]]
    crowd = [token_ids(answer) for answer in at_once(server.url, *calls)]
    assert crowd[:4] == alone
    other = token_ids(at_once(server.url, ask(20, seed=99, **options))[0])
    assert other != alone[0]


def test_the_log_probabilities_of_prompts_equal_transformers(server: ServerProcess) -> None:
    """The prompts are computed at the same time."""
    lengths = [1, 2, 17, 300, 1024, 1500]
    asked = [ask(n, max_new_tokens=1, decoder_input_details=True) for n in lengths]
    two = {"decoder_input_details": True, "best_of": 2, "do_sample": True, "max_new_tokens": 2}
    *answers, best = at_once(server.url, *asked, generate("Once upon a time", **two))
    for length, answer in zip(lengths, answers, strict=True):
        prefill, ids = answer["details"]["prefill"], prompt(length)[1]
        assert [token["id"] for token in prefill] == ids and prefill[0]["logprob"] is None
        assert [token["logprob"] for token in prefill[1:]] == pytest.approx(prompt_logprobs(ids), abs=1e-4)
    (other,) = best["details"]["best_of_sequences"]
    assert best["details"]["prefill"] == other["prefill"] and len(other["prefill"]) > 1


def test_multiple_choice_is_scored_as_by_transformers(server: ServerProcess) -> None:
    """The requests and sums of lm-eval's `local-completions`: token ids, `echo`, and one token that is ignored."""
    question, answers = "<|user|>What is 2 + 3?</s><|assistant|>", ["2 + 3 = 5", "2 + 3 = 7", "5, says the fox", "é😀"]
    context = tokenizer().encode(question, add_special_tokens=False).ids
    prompts = [[*context, *tokenizer().encode(answer, add_special_tokens=False).ids] for answer in answers]
    asked = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = httpx.post(f"{server.url}/v1/completions", json={"model": "demo", **asked}, timeout=60).json()["choices"]
    scores = []
    for ids, choice in zip(prompts, sorted(choices, key=itemgetter("index")), strict=True):
        logprobs, tops = (choice["logprobs"][name][len(context) : -1] for name in ("token_logprobs", "top_logprobs"))
        is_greedy = all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))
        expected = prompt_logprobs(ids)[len(context) - 1 :]
        assert logprobs == pytest.approx(expected, abs=1e-4) and sum(logprobs) == pytest.approx(sum(expected), abs=1e-3)
        best = distance_to_greedy(context, ids[len(context) :])
        assert is_greedy == bool((best <= NEAR_TIE).all())
        scores.append(sum(logprobs))
    assert scores.index(max(scores)) == 0 and scores[0] > scores[1] + 1


def test_truncation_keeps_the_end_of_the_prompt(server: ServerProcess) -> None:
    text, kept = prompt(30)
    tail = tokenizer().decode(kept)
    short, long = at_once(server.url, ask(30), generate(text, truncate=30, max_new_tokens=8))
    assert token_ids(long) == token_ids(short)[:8]
    assert text.endswith(tail)
