"""The forward pass of a step. Decode steps, and steps of few tokens, read fixed tensors and are recorded. Other steps
are laid out in new tensors.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from text_generation_server.device.graphs import Forward, Head, Signal
from text_generation_server.kernels.interface import KvLayer
from text_generation_server.models.model import Model
from text_generation_server.platforms import Platform
from text_generation_server.sampling.prompt_logprobs import PromptScores, score_prompts
from text_generation_server.step.layout import DecodeInputs, MixedInputs, lay_out
from text_generation_server.step.preparation import PreparedStep, ScoredTokens
from text_generation_server.step.rows import Rows

# Least number of rows that torch multiplies in float32. With fewer rows the BLAS library computes in another order, and
# the last bits differ. Products of kernels/cpu do not need this padding.
MIN_EXACT_ROWS = 16
# The logits of hidden states, whose tokens have these adapters, as in the `StepInput`.
Logits = Callable[[Tensor, Tensor | None], Tensor | None]
NO_ROWS = torch.empty(0, dtype=torch.int32).numpy()


class Forwarded(NamedTuple):
    """What a forward pass makes. A named tuple, because each step makes one."""

    logits: Tensor | None  # what the head makes of the hidden states of the rows that get a token; None if no row does
    rows_R: Tensor  # int32: these rows
    scores: PromptScores | None = None  # on rank 0, if log-probabilities of prompts are wanted


class ForwardPass:
    """Runs the model on the rows and the cache of one Warmup."""

    def __init__(self, model: Model, platform: Platform, cache: list[KvLayer], rows: Rows, slots: int) -> None:
        """`slots` is the number of slots in the cache, without the extra slot for padding."""
        self._model = model
        self._kernels = platform.kernels
        self._graphs = platform.graphs
        self._adapter_graphs = platform.adapter_graphs
        self._mixed_graphs = platform.mixed_graphs
        self._cache = cache
        self._rows = rows
        self._inputs = DecodeInputs(self._graphs.size(rows.count), rows, slots)
        self._mixed_inputs = MixedInputs(max(self._mixed_graphs.sizes, default=0), rows, slots)
        is_exact = platform.device.type == "cpu" and model.dtype == torch.float32
        self._min_tokens = MIN_EXACT_ROWS if is_exact else 1

    def __call__(self, step: PreparedStep, on_layer: Signal, head: Logits) -> Forwarded:
        """`head` makes the logits of the rows that get a token."""
        count = len(step.sampled.rows)
        if not step.chunks:
            logits = self._decode(step, on_layer, head)
            return Forwarded(None if logits is None else _first(logits, count), self._inputs.rows_R(count))
        hidden, adapters_T, sampled_tokens, rows_R = self._mixed(step, on_layer)
        logits = _after(hidden, adapters_T, head)(sampled_tokens) if count else None
        scores = None
        if step.scored is not None:
            scores = self._score(_after(hidden, adapters_T, self._model.logits), step.scored, on_layer)
        return Forwarded(None if logits is None else logits[:count], rows_R, scores)

    def record(self, on_layer: Signal) -> None:
        """Runs and records steps of padding only: mixed steps, and decode steps of all sizes that a step of these rows
        can have.
        """
        for size in self._mixed_graphs.sizes:
            self._mixed_inputs.fill(None, self._min_tokens)
            self._mixed_graphs.record(size, self._mixed_forward(size), on_layer)
        ways = [(self._graphs, False), *([(self._adapter_graphs, True)] if self._rows.adapter_slots else [])]
        for graphs, with_adapters in ways:
            for size in graphs.sizes_to_record(self._rows.count):
                self._inputs.fill(NO_ROWS, NO_ROWS, size)
                forward = self._decode_forward(size, with_adapters)
                graphs.record_with_head(size, forward, self._head(size, self._model.logits, with_adapters), on_layer)

    def _decode(self, step: PreparedStep, on_layer: Signal, head: Logits) -> Tensor | None:
        graphs = self._adapter_graphs if step.has_adapters else self._graphs
        size = graphs.size(len(step.decode.rows_R))
        self._inputs.fill(step.decode.rows_R, step.slots_R, size)
        of_size = self._head(size, head, step.has_adapters)
        return graphs.run_with_head(size, self._decode_forward(size, step.has_adapters), of_size, on_layer)

    def _head(self, size: int, head: Logits, with_adapters: bool) -> Head:
        """The logits of a decode step of `size` rows."""
        return lambda hidden: head(hidden, self._inputs.adapters_T(size, self._min_tokens, with_adapters))

    def _decode_forward(self, size: int, with_adapters: bool = False) -> Forward:
        """The forward pass of a decode step of `size` rows, which reads and writes the same addresses in every call."""

        def forward(on_layer: Signal) -> Tensor:
            step_input = self._inputs.step_input(self._kernels, size, self._min_tokens, with_adapters)
            return self._model.forward(step_input, self._cache, on_layer)

        return forward

    def _mixed(self, step: PreparedStep, on_layer: Signal) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Hidden states and adapters of a step with chunks, the tokens after which a token is sampled, and their
        rows."""
        inputs, size = self._mixed_inputs, self._mixed_graphs.size(step.tokens)
        if not step.has_adapters and self._mixed_graphs.is_recorded(size) and inputs.fits(step, size):
            inputs.fill(step, self._min_tokens)
            hidden = self._mixed_graphs.run(size, self._mixed_forward(size), on_layer)
            return hidden, None, *inputs.sampled(len(step.sampled.rows), self._min_tokens)
        mixed = lay_out(step, self._rows, self._kernels, self._min_tokens)
        hidden = self._model.forward(mixed.input, self._cache, on_layer)
        return hidden, mixed.input.adapters_T, mixed.sampled_tokens, mixed.sampled_rows_R

    def _score(self, logits_after: Head, scored: ScoredTokens, on_progress: Signal) -> PromptScores | None:
        return score_prompts(
            scored,
            self._rows.history,
            logits_after,
            vocab_size=self._model.vocab_size,
            min_rows=self._min_tokens,
            on_progress=on_progress,
        )

    def _mixed_forward(self, size: int) -> Forward:
        """The forward pass of a step of `size` tokens, which reads and writes the same addresses in every call."""

        def forward(on_layer: Signal) -> Tensor:
            return self._model.forward(self._mixed_inputs.step_input(self._kernels, size), self._cache, on_layer)

        return forward


def _after(hidden_TH: Tensor, adapters_T: Tensor | None, head: Logits) -> Head:
    """Gives the logits after some tokens of a step, by the tokens' indices."""
    return lambda tokens: head(hidden_TH[tokens], None if adapters_T is None else adapters_T[tokens])


def _first(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) == count else rows[:count]
