"""Makes the largest step that a shard may be asked to run, to find out whether memory suffices and how long a step may
take.
"""

import time
from collections.abc import Callable

import torch

from text_generation_common.sampling import Sampling
from text_generation_server.step.rows import PromptChunk

EVERY_OPTION = Sampling(
    do_sample=True, temperature=0.9, top_k=10, top_p=0.9, typical_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1,
    watermark=True, top_n_tokens=5,
)  # fmt: skip


def largest_step(tokens: int, longest: int) -> list[PromptChunk]:
    """Prompts of `tokens` tokens in all, each at most `longest`, sampled with every option."""
    ids, slots = torch.zeros(longest, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)
    chunks = []
    for first in range(0, tokens, longest - 1):
        length = min(longest - 1, tokens - first)
        own_slots = slots[first : first + length]
        chunks.append(PromptChunk(first, 0, length, True, ids[:length], own_slots, length, EVERY_OPTION))
    return chunks


class LongestPause:
    """Passes progress reports on, and measures the longest time between two of them."""

    def __init__(self, on_progress: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._on_progress = on_progress
        self._clock = clock
        self._last = clock()

    def __call__(self) -> None:
        now = self._clock()
        self.seconds, self._last = max(self.seconds, now - self._last), now
        self._on_progress()
