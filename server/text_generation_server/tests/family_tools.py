"""What the tests of families share: checkpoints and runners, which are made once, and the logits of texts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import SHAPE, VARIANTS, first_variant, make_family
from family_ranges import least_gap
from shard_tools import fresh_client, make_runner, random_ids

from text_generation_common.models.config import read_config
from text_generation_common.models.families import FAMILIES
from text_generation_common.models.values import Fields
from text_generation_common.sampling import Sampling
from text_generation_server.runner import ModelRunner

# Logits of these models reach ±40, and float32 computes them to 1e-4 of that. A score of 60 is rounded by
# 4e-6, and an attention with such scores hands on its rounding errors some tens of times as large as it got them.
ROUNDING = 4e-3
# Most families stay far below ROUNDING. gpt_oss, whose scores are the largest, comes to it: ours and transformers lie
# on two sides of the float64 logits, and how far depends on the order of sums in the processor's matrix products.
TOLERANCE = 2.5 * ROUNDING
# Least distance of an expert that is chosen from one that is not, as a share of a token's largest logit: ten times the
# rounding error above. At a smaller one, a sum in another order may choose another expert.
LEAST_GAP, MAX_DRAWS = 1e-4, 20
VOCABULARY = 320
EVERYTHING = Sampling(top_n_tokens=VOCABULARY)  # greedy, with the log-probabilities of all tokens
TYPES = tuple(dict.fromkeys(model_type for model_type, _ in VARIANTS.values()))
FIRST = tuple(map(first_variant, TYPES))


def fields_of(model_type: str) -> list[str]:
    """The fields of config.json that the family's reader asks for, in any of the variants, and those of all families
    that are read before."""
    asked = {"compression_config", "model_type", "quantization_config"}
    for family, changes in VARIANTS.values():
        if family == model_type:
            fields = Fields({**SHAPE, **changes, "model_type": model_type}, "config.json")
            FAMILIES[model_type](fields)
            asked |= fields.asked
    return sorted(asked)


def quick_and_long(quick: Iterable[str] = FIRST) -> list[Any]:
    """All variants, as parameters of a test. All but the `quick` ones are marked `models`."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.models) for name in VARIANTS]


@dataclass
class Made:
    """A checkpoint, and transformers' own model of it."""

    path: Path
    model: torch.nn.Module

    @cached_property
    def longest(self) -> int:
        """The longest text that is compared. longrope: transformers takes the factors of each text's length, and we
        those of the longest text."""
        return 128 if any(rope.scaling.kind == "longrope" for rope in read_config(self.path).ropes) else 512

    @cached_property
    def runner(self) -> ModelRunner:
        runner = make_runner(self.path, max_total_tokens=self.longest)
        runner.warmup(self.longest, None, 16, 1024)
        return runner


class Checkpoints:
    """Makes each checkpoint once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, bool], Made] = {}

    def __call__(self, variant: str, calm: bool = False) -> Made:
        if (variant, calm) not in self._made:
            path = self._folder / str(len(self._made))
            self._made[variant, calm] = Made(path, make_family(path, variant, calm))
        return self._made[variant, calm]


@dataclass
class Text:
    prompt: torch.Tensor
    tokens: list[int]
    rows: torch.Tensor  # log-probabilities [new, V]


def write_texts(runner: ModelRunner, prompts: list[torch.Tensor], new: int) -> list[Text]:
    """The greedy texts of `prompts`, which are computed side by side."""
    client = fresh_client(runner)
    numbers = list(range(len(prompts)))
    outputs = [client.step([], [client.first_chunk(i, prompts[i], parameters=EVERYTHING) for i in numbers])]
    outputs += [client.step(numbers) for _ in range(new - 1)]
    rows = torch.zeros(new, len(prompts), VOCABULARY)
    for step, output in enumerate(outputs):
        assert sorted(output.request_ids) == numbers
        scattered = torch.zeros(len(prompts), VOCABULARY).scatter_(
            1, output.top_ids.long().view(-1, VOCABULARY), output.top_logprobs.view(-1, VOCABULARY)
        )
        rows[step, output.request_ids] = scattered
    return [Text(prompts[i], client.tokens[i], rows[:, i]) for i in numbers]


def teacher_forced(model: torch.nn.Module, prompt: torch.Tensor, output: list[int]) -> torch.Tensor:
    """transformers' log-probabilities [new, V] for each step of our text."""
    ids = torch.cat([prompt, torch.tensor(output)])
    with torch.no_grad():
        logits = model(ids.unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1)


def texts_beside(
    model: torch.nn.Module, runner: ModelRunner, lengths: Iterable[int], new: int
) -> Iterator[tuple[Text, torch.Tensor]]:
    """A greedy text of a random prompt of each length, and transformers' log-probabilities [new, V] for its steps.
    Prompts are drawn again where rounding would choose an expert."""
    left = list(lengths)
    for seed in range(MAX_DRAWS):
        for text in write_texts(runner, [random_ids(length, seed) for length in left], new):
            if least_gap(model, torch.cat([text.prompt, torch.tensor(text.tokens)])) >= LEAST_GAP:
                left.remove(len(text.prompt))
                yield text, teacher_forced(model, text.prompt, text.tokens)
        if not left:
            return
    raise AssertionError(f"for prompts of {left} tokens rounding chooses experts in each of {MAX_DRAWS} texts")


def mean_error(model: torch.nn.Module, runner: ModelRunner) -> float:
    """How far the log-probabilities of all tokens are from transformers', in texts of random prompts."""
    texts = write_texts(runner, [random_ids(24, seed) for seed in range(16)], 8)
    errors = [text.rows - teacher_forced(model, text.prompt, text.tokens) for text in texts]
    return torch.cat(errors).abs().mean().item()
