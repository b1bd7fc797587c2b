"""Makes the steps of a warm-up: small steps, which compile all kernels, and then the largest step that a shard may be
asked to run, to find out whether memory suffices and how long a step may take.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from text_generation_common.sampling import NEUTRAL, Sampling
from text_generation_server.device.transfers import send
from text_generation_server.kernels.interface import WORD_BITS, Masks
from text_generation_server.step.rows import PromptChunk, StepBatch

EVERY_OPTION = Sampling(
    do_sample=True, temperature=0.9, top_k=10, top_p=0.9, min_p=0.01, typical_p=0.9, seed=1, repetition_penalty=1.2,
    frequency_penalty=0.1, presence_penalty=0.1, watermark=True, top_n_tokens=5, logit_bias=((0, 0.5),),
    allowed_token_ids=(0, 1, 2), bad_words_ids=((2,), (0, 0, 1)), min_new_tokens=2, end_token_ids=(1,),
    grammar="{}",
)  # fmt: skip
SMALL_TOKENS = 16
SMALL_ROWS = 3


@dataclass(frozen=True, slots=True)
class WarmupStep:
    """Arguments of a step. They make a batch of number 0."""

    decoding: list[StepBatch]
    slots_R: Tensor
    chunks: list[PromptChunk]


def small_steps(tokens: int, longest: int) -> list[WarmupStep]:
    """A prompt, and then another prompt beside a row that decodes, with every option and log-probabilities of the
    prompts; then a prompt without options, for which the ranks of a group sample in another way. The steps need
    SMALL_ROWS rows, and have no more than `tokens` tokens. All tokens share slot 0, because what is computed does not
    matter.
    """
    length = min(SMALL_TOKENS, tokens, max(1, longest - 2))
    zeros = torch.zeros(length, dtype=torch.int32)
    first, second, third = (
        PromptChunk(
            request_id=i,
            start=0,
            end=length,
            last=True,
            ids=zeros,
            slots=zeros,
            prompt_length=length,
            sampling=sampling,
            prompt_logprobs=prompt_logprobs,
        )
        for i, (sampling, prompt_logprobs) in enumerate([(EVERY_OPTION, 5), (EVERY_OPTION, 5), (NEUTRAL, None)])
    )
    has_room = length + 1 < longest  # for the token that the first prompt's row decodes
    return [
        WarmupStep([], zeros[:0], [first]),
        WarmupStep([StepBatch(0, [0])] if has_room else [], zeros[: int(has_room)], [second]),
        WarmupStep([], zeros[:0], [third]),
    ]


def largest_step(tokens: int, longest: int) -> list[PromptChunk]:
    """Prompts of `tokens` tokens in all, each at most `longest`, sampled with every option."""
    ids, slots = torch.zeros(longest, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)
    chunks = []
    for first in range(0, tokens, longest - 1):
        length = min(longest - 1, tokens - first)
        own_slots = slots[first : first + length]
        chunks.append(
            PromptChunk(
                request_id=first,
                start=0,
                end=length,
                last=True,
                ids=ids[:length],
                slots=own_slots,
                prompt_length=length,
                sampling=EVERY_OPTION,
            )
        )
    return chunks


def all_allowed(rows: Sequence[int], vocab_size: int, device: torch.device) -> Masks:
    """Masks with which a step's rows `rows`, which have a grammar, can choose every token. The grammar of EVERY_OPTION
    is never read."""
    words = -(-vocab_size // WORD_BITS)
    rows_M, bits = send([np.array(rows, np.int32), np.full(len(rows) * words, -1, np.int32)], device)
    return Masks(rows_M, bits.view(len(rows), words))


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
