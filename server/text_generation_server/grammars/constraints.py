"""The requests of a shard that have a grammar: their masks before each step is sampled, and their tokens after it.

A step's masks need the tokens of the step before. So they are made while the device computes the step's forward pass:
the host waits for the step before, lets each matcher read its token, and fills the masks.
"""

from collections import deque
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from text_generation_common.errors import DEAD_END, LOST
from text_generation_server.device.transfers import ALIGNED_WORDS, host_words
from text_generation_server.errors import MatcherError
from text_generation_server.grammars.compiler import GrammarCompiler, reason_of
from text_generation_server.grammars.rows import WAIT_S, CompilePatience, ConstrainedRow, StepConstraints
from text_generation_server.kernels.interface import WORD_BITS, Masks
from text_generation_server.step.rows import PromptChunk

if TYPE_CHECKING:
    from llguidance import LLExecutor

MIN_PARALLEL = 8  # least number of masks that are filled by several threads
WORD_BYTES = 4


class Constraints:
    """Not thread-safe: the worker's thread makes all calls, on rank 0 only."""

    def __init__(self, compiler: GrammarCompiler, device: torch.device, threads: int = 1) -> None:
        """`threads`: number of threads that fill the masks of a step with MIN_PARALLEL masks or more."""
        self._compiler = compiler
        self._device = device
        self._threads = threads
        self._rows: dict[int, ConstrainedRow] = {}
        self._unread: deque[StepConstraints] = deque()  # steps that are launched, whose tokens no matcher has read

    @property
    def num_rows(self) -> int:
        """Number of requests with a grammar that have a row."""
        return len(self._rows)

    def await_tokenizer(self) -> None:
        """Waits until the tokenizer for grammars is read."""
        with suppress(MatcherError):
            self._compiler.prepare().result()

    def join(self, chunks: Iterable[PromptChunk]) -> None:
        """Begins to compile the grammars of the requests whose first chunk is among `chunks`."""
        for chunk in chunks:
            if chunk.sampling is not None and chunk.sampling.grammar and chunk.ids is not None:
                output = chunk.ids[chunk.prompt_length :].tolist()
                started = self._compiler.start(chunk.sampling.grammar, output)
                self._rows[chunk.request_id] = ConstrainedRow(chunk.request_id, started)

    def keep(self, requests: Container[int]) -> None:
        """Forgets all requests but these."""
        if self._rows:
            self._rows = {i: row for i, row in self._rows.items() if i in requests}

    def clear(self) -> None:
        self._rows.clear()
        self._unread.clear()

    def begin(self, request_ids: Sequence[int], places: Sequence[int]) -> StepConstraints:
        """Makes the masks of a step: of its requests `request_ids`, those at `places` have a grammar. To be called when
        the step's forward pass has been launched: waits for the tokens of earlier steps, and at most WAIT_S for
        grammars that are being compiled. Raises the device's error if an earlier step failed.
        """
        while self._unread:
            self._unread.popleft().read()
        step, patience = StepConstraints(), CompilePatience(WAIT_S)
        for place in places:
            row = self._rows[request_ids[place]]
            if row.is_over:
                continue
            try:
                row.await_matcher(patience)
            except MatcherError as error:
                step.fail(row, str(error))
            else:
                step.add(place, row)
        if step.places:
            step.masks = self._fill(step)
        self._unread.append(step)
        return step

    def finish(self, step: StepConstraints) -> StepConstraints:
        """The step, when the matchers have read its tokens. Waits for them. Raises the device's error."""
        while not step.is_read:
            self._unread.popleft().read()
        return step

    def _fill(self, step: StepConstraints) -> Masks:
        count, words = len(step.places), -(-self._compiler.num_tokens // WORD_BITS)
        first = -(-count // ALIGNED_WORDS) * ALIGNED_WORDS  # the masks begin at a multiple of 16 bytes
        host = host_words(first + count * words, self._device)
        host.numpy()[:count] = step.places
        bits = host[first:].view(count, words).zero_()
        address, width = host.data_ptr() + WORD_BYTES * first, WORD_BYTES * words
        matchers = [row.matcher for row in step.rows if row.matcher is not None]
        if count >= MIN_PARALLEL and self._threads > 1:
            pairs = [(matcher, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, address, width, count)
        else:
            for i, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(address + i * width, width)
        has_token = bits.any(dim=1).tolist()
        for i, row in enumerate(step.rows):
            if matchers[i].is_error():
                step.fail(row, f"{LOST}: {reason_of(matchers[i])}")
            elif not has_token[i]:
                step.fail(row, DEAD_END)
        there = host.to(self._device, non_blocking=True)
        return Masks(there[:count], there[first:].view(count, words))

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor(self._threads)
