"""CPU time of turning a token id into text: the demo model's tokenizer, with and without stop strings."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from text_generation_benchmark.output import table
from text_generation_router.text.tokens.detokenization import TextStream, Vocabulary

TOKENS, PROMPT_TOKENS = 2000, 500
STOPS: dict[str, tuple[str, ...]] = {"no stop strings": (), "two stop strings": ("\nObservation:", "<|im_end|>")}


def measure(model: Path, rounds: int) -> dict[str, float]:
    """Microseconds per token for each case of STOPS: the best of `rounds`, each of TOKENS random tokens."""
    vocabulary = Vocabulary.of(Tokenizer.from_file(str(model / "tokenizer.json")))
    ordinary = [i for i in range(vocabulary.tokenizer.get_vocab_size()) if i not in vocabulary.special_ids]
    draw = random.Random(0)
    rounds_ids = [draw.choices(ordinary, k=PROMPT_TOKENS + TOKENS) for _ in range(rounds)]
    return {
        name: min(_one_round(vocabulary, ids, stop) for ids in rounds_ids) / TOKENS * 1e6
        for name, stop in STOPS.items()
    }


def _one_round(vocabulary: Vocabulary, ids: Sequence[int], stop: Sequence[str]) -> float:
    stream = TextStream(vocabulary, ids[:PROMPT_TOKENS], stop)
    start = time.thread_time()
    for token_id in ids[PROMPT_TOKENS:]:
        stream.push(token_id)
    stream.flush()
    stream.text()
    return time.thread_time() - start


def as_markdown(times_us: dict[str, float]) -> str:
    lines = [(name, f"{time_us:.2f}") for name, time_us in times_us.items()]
    return table(("detokenizing", "microseconds a token"), lines)
