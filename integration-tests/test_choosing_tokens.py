"""Parameters that name tokens and words do to a text what docs/choosing-tokens.md says."""

from typing import Any

import httpx
from calls import at_once, generate, token_ids, tokenizer
from server_process import ServerProcess

STORY = "<|user|>Tell me a story about a river.</s><|assistant|>"
END = 2  # the demo model's end token


def told(server: ServerProcess, **parameters: Any) -> tuple[list[int], str, str]:
    """The token ids of a greedy story, its text, and why it ended."""
    answer = at_once(server.url, generate(STORY, **{"max_new_tokens": 24, "details": True} | parameters))[0]
    return token_ids(answer), answer["generated_text"], answer["details"]["finish_reason"]


def test_a_text_has_allowed_tokens_only_and_no_bad_word(server: ServerProcess) -> None:
    ids, text, _ = told(server)
    allowed = sorted({*ids, 300, 301} - {ids[3]})
    assert set(told(server, allowed_token_ids=allowed)[0]) <= set(allowed)
    words = [word for word in text.split() if word.isalpha()][:3]
    assert len(words) == 3
    assert not set(words) & set(told(server, bad_words=words)[1].split())


def test_a_text_ends_with_its_own_stop_token_but_not_before_min_new_tokens(server: ServerProcess) -> None:
    ids, _, _ = told(server)
    stop = ids[2]
    ended = (ids[: ids.index(stop) + 1], "eos_token")
    for ignores in (False, True):
        stopped, _, reason = told(server, stop_token_ids=[stop], ignore_eos_token=ignores)
        assert (stopped, reason) == ended
    longer, _, reason = told(server, stop_token_ids=[stop], min_new_tokens=8)
    assert len(longer) > 8 and stop not in longer[:-1] and END not in longer[:-1]
    assert (reason == "eos_token") == (longer[-1] in (stop, END))


def test_a_model_that_would_end_goes_on_until_min_tokens(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}
    url = f"{server.url}/v1/chat/completions"
    short = httpx.post(url, json=body, timeout=60).json()
    least = int(short["usage"]["completion_tokens"]) + 5
    long = httpx.post(url, json=body | {"min_tokens": least}, timeout=60).json()
    assert long["usage"]["completion_tokens"] > least
    assert long["choices"][0]["message"]["content"] != short["choices"][0]["message"]["content"]


def test_a_bias_forces_or_forbids_a_token_and_the_largest_min_p_leaves_the_best(server: ServerProcess) -> None:
    ids, _, _ = told(server)
    forced = tokenizer().encode_batch([" lamp"])[0].ids[-1]
    assert set(told(server, logit_bias={str(forced): 100})[0]) == {forced}
    assert ids[0] not in told(server, logit_bias={str(ids[0]): -100})[0]
    assert told(server, do_sample=True, seed=3, min_p=1.0)[0] == ids
