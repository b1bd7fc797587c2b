"""What a step costs, learned from the times of earlier steps.

A token of a prompt costs the more, the more tokens come before it. How much depends on the machine and the model.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import add
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.chunks import shares
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.step import Chunk

Floats = npt.NDArray[np.float64]

# The newest samples of each kind of step are kept: a long run of decode steps must not remove the samples of prompts.
SAMPLES_OF_A_KIND = 4
MAX_KINDS = 64
# Costs are not quite linear (keys that fit into a cache are read faster), so what is foretold for a step with chunks is
# multiplied by the median error of this many last ones.
LAST_STEPS = 5
# Steps without chunks that are remembered for each size. They are many, because the text of a long prompt is tokenized
# just before its first chunk, which makes the last of them slower on a CPU.
DECODE_STEPS = 25
# Keeps equations solvable when the samples do not tell two columns apart. Their columns have length 1.
RIDGE = 1e-9


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """Attention of a chunk computes whole blocks of queries: a chunk that fills its last block in part costs as much as
    one that fills it."""

    queries: int = 1  # number of queries of a block, all of one key head
    per_token: int = 1  # number of queries of a token: query heads for each key head

    @property
    def tokens(self) -> int:
        """Maximum number of tokens whose queries fit into one block, at least 1."""
        return max(1, self.queries // self.per_token)

    def tokens_computed(self, tokens: int) -> float:
        """The number of tokens that fill the blocks of a chunk of `tokens` tokens."""
        return -(-tokens * self.per_token // self.queries) * self.queries / self.per_token


SINGLE_QUERIES = QueryBlocks()


class StepWork(NamedTuple):
    rows: int = 0  # number of decoding rows
    keys: int = 0  # number of tokens that the rows attend to
    prompt_tokens: int = 0  # number of tokens in chunks
    # number of tokens that the tokens in chunks attend to, counted for each token that their blocks have room for
    prompt_keys: int = 0
    prompt_contexts: int = 0  # the same, counted once for each chunk: keys are read once for several tokens

    @classmethod
    def of(
        cls,
        decoding: Collection[Running],
        chunks: Iterable[tuple[int, int]] = (),
        blocks: QueryBlocks = SINGLE_QUERIES,
    ) -> "StepWork":
        """The work of a step that carries one token of each of `decoding`, and the positions start … end - 1 of each of
        `chunks`."""
        keys = sum(len(r.request.input_ids) + r.num_sent for r in decoding)
        tokens = prompt_keys = contexts = 0
        for start, end in chunks:
            tokens += end - start
            prompt_keys += round(keys_of(start, end) * blocks.tokens_computed(end - start) / (end - start))
            contexts += end
        return cls(len(decoding), keys, tokens, prompt_keys, contexts)

    def beside(self, other: "StepWork") -> "StepWork":
        """The work of a step that does both."""
        return StepWork(*map(add, self, other))

    @property
    def kind(self) -> tuple[int, int, int]:
        """Equal for steps whose numbers are of the same size."""
        per_token = self.prompt_keys // self.prompt_tokens if self.prompt_tokens else self.keys // max(1, self.rows)
        return self.rows.bit_length(), self.prompt_tokens.bit_length(), per_token.bit_length()

    @property
    def columns(self) -> tuple[float, ...]:
        """The step as such, the same once more if it has chunks (such steps are not recorded on CPUs), and its
        numbers."""
        return 1.0, float(self.prompt_tokens > 0), *self


def keys_of(start: int, end: int) -> int:
    """Total number of tokens that the tokens start … end - 1 of a prompt attend to: each to itself and to all before
    it."""
    return (end * (end + 1) - start * (start + 1)) // 2


class StepCosts(Protocol):
    def seconds(self, work: StepWork) -> float | None:
        """How long a step takes. None: not known yet."""

    def learn(self, work: StepWork, seconds: float) -> None: ...


class LearnedCosts:
    """A cost for each unit of work, fitted to the newest steps of each kind by least squares, and corrected by the
    errors of the last steps with chunks."""

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int, int], deque[tuple[float, ...]]] = {}  # the kind used last comes last
        self._costs: Floats | None = None  # seconds of one unit of each of `StepWork.columns`
        self._is_fitted = True
        self._errors: deque[float] = deque(maxlen=LAST_STEPS)  # time ÷ linear forecast, of steps with chunks
        # The last steps without chunks and their seconds, by the number of bits of their number of rows.
        self._decoded: dict[int, deque[tuple[StepWork, float]]] = {}

    def learn(self, work: StepWork, seconds: float) -> None:
        if work.prompt_tokens and (foretold := self._linear(work)):
            self._errors.append(seconds / foretold)
        if not work.prompt_tokens:
            self._decoded.setdefault(work.rows.bit_length(), deque(maxlen=DECODE_STEPS)).append((work, seconds))
        of_kind = self._samples.pop(work.kind, None) or deque(maxlen=SAMPLES_OF_A_KIND)
        of_kind.append((*work.columns, seconds))
        self._samples[work.kind] = of_kind
        if len(self._samples) > MAX_KINDS:
            del self._samples[next(iter(self._samples))]
        self._is_fitted = False

    def seconds(self, work: StepWork) -> float | None:
        foretold = self._linear(work)
        if foretold is None:
            return None
        if work.prompt_tokens:
            return foretold * median(self._errors or [1.0])
        return median(
            [self._of_rows(work.rows, *last) for last in self._decoded.get(work.rows.bit_length(), ())] or [foretold]
        )

    def _of_rows(self, rows: int, last: StepWork, seconds: float) -> float:
        """The time of a step without chunks, from that of another with about as many rows. Its rows count as if their
        contexts had not grown: beside a long prompt no step is without chunks, and what keys cost is not known well
        enough from the few steps before it."""
        alike = StepWork(rows, last.keys * rows // max(1, last.rows))
        before, now = self._linear(last), self._linear(alike)
        return seconds * now / before if before and now else seconds

    def _linear(self, work: StepWork) -> float | None:
        if not self._is_fitted:
            self._is_fitted, self._costs = True, self._fit()
        return None if self._costs is None else float(np.dot(self._costs, work.columns))

    def _fit(self) -> Floats | None:
        """None while no step with chunks is known, or none without."""
        if len({bool(tokens) for _, tokens, _ in self._samples}) < 2:
            return None
        samples = np.array([sample for of_kind in self._samples.values() for sample in of_kind])
        return fit_relative(samples[:, :-1], samples[:, -1])


def fit_relative(work: Floats, seconds: Floats, refinements: int = 2) -> Floats:
    """The cost of each column of `work` [steps, columns], none below zero. Minimizes the errors relative to the times:
    with absolute errors, a few long steps would outweigh many short ones. A step that the last fit was far from counts
    less: something else may have held it up.
    """
    weights = 1 / seconds
    costs = least_squares(work * weights[:, None], seconds * weights)
    for _ in range(refinements):
        error = np.abs(work @ costs / seconds - 1)
        weights = 1 / (seconds * np.sqrt(np.maximum(error, 0.05)))
        costs = least_squares(work * weights[:, None], seconds * weights)
    return costs


def least_squares(matrix: Floats, target: Floats) -> Floats:
    """Solves least squares for x without negative elements: the x for which matrix · x is nearest to target. Tries each
    subset of columns, so it is for few columns only.
    """
    count = matrix.shape[1]
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1
    scaled = matrix / lengths
    used = (np.arange(1, 2**count)[:, None] >> np.arange(count) & 1).astype(bool)
    products, aims = scaled.T @ scaled, scaled.T @ target
    both = used[:, :, None] & used[:, None, :]
    solutions = np.linalg.solve(
        np.where(both, products, 0) + np.where(used, RIDGE, 1)[:, :, None] * np.eye(count), (aims * used)[:, :, None]
    )[:, :, 0]
    solutions[~used] = 0
    errors = np.einsum("si,ij,sj->s", solutions, products, solutions) - 2 * solutions @ aims
    errors[(solutions < 0).any(axis=1)] = 0  # the error of x = 0
    best = int(np.argmin(errors))
    return solutions[best] / lengths if errors[best] < 0 else np.zeros(count)


# How many prompt tokens a step carries beside streams.
#
# Streams get one token from each step, so a step that computes a long chunk of a prompt keeps them all waiting.

# A step beside streams carries at least this many prompt tokens, whatever they cost: fewer would each cost much more,
# because a chunk's keys are read once for all its tokens. The CPU kernels compute shorter chunks token by token. If
# more tokens than these fit into a block of queries, it carries those of a block: fewer would save little time.
FEWEST_TOKENS = 8
# While streams that a loss has stopped are computed again, the bound is this many times as long: they wait for seconds,
# and those that go on already for a part of one. Not so where more than MANY streams go on for each of them: one very
# long stream would slow down many.
AFTER_A_LOSS = 4.0
MANY = 16
# Steps without chunks are alike: the costs are learned from one of this many. It is not a power of two: work that comes
# with every eighth step would be in all samples or in none.
SAMPLED_DECODE_STEPS = 5


def patience(num_streams: int, prefilling: Iterable[Running]) -> float:
    """How many times as long as otherwise `num_streams` streams wait for their next tokens."""
    num_stopped = sum(request.is_stopped for request in prefilling)
    return AFTER_A_LOSS if num_stopped and num_streams <= MANY * num_stopped else 1.0


class ChunkBudget:
    """The prompt tokens of a step. Without decoding rows, and while costs are not known, these are all that the limit
    allows. Beside streams, a step takes at most `slowdown` times as long as it would take without chunks; 0: any time.
    It has a block's tokens, or FEWEST_TOKENS if they are more, even where they take longer.

    If a step of full size would complete more prompts than there are streams, it may take longer in the same ratio:
    more requests wait for their first token than for their next one. And it may take AFTER_A_LOSS times as long while
    streams that a loss has stopped are computed again; or the streams that go on are left out of several steps that
    take as long together.
    """

    def __init__(self, limit: int, slowdown: float, costs: StepCosts) -> None:
        self.newest = limit  # the most prompt tokens of the last step that had any
        self.at_least = min(limit, FEWEST_TOKENS) if slowdown else limit  # what every step can carry
        self._limit = limit
        self._slowdown = slowdown
        self._costs = costs
        self._blocks = SINGLE_QUERIES
        self._left_out_s = 0.0  # forecast of the last steps, which have left the streams out
        self._sent: dict[int, StepWork] = {}  # by the number of a step that has not answered

    def begin_epoch(self, blocks: QueryBlocks) -> None:
        """The steps from now on are computed by new shards, whose attention computes chunks in such blocks."""
        self._blocks = blocks
        if self._slowdown:
            self.at_least = min(self._limit, max(FEWEST_TOKENS, blocks.tokens))

    def choose(self, decoding: Collection[Running], prefilling: Sequence[Running]) -> int:
        """The most prompt tokens of the next step."""
        if prefilling:
            self.newest = self._limit
            if self._slowdown and decoding:
                alone = StepWork.of(decoding)
                if seconds := self._costs.seconds(alone):
                    self.newest = self._fitting(alone, seconds, prefilling)
        return self.newest

    def leaves_out(self, decoding: Collection[Running], prefilling: Sequence[Running]) -> bool:
        """Whether the next step leaves out the streams of `decoding`: to be called once for each step."""
        may_wait = bool(decoding) and patience(len(decoding), prefilling) > 1
        known = self._costs.seconds(StepWork.of(decoding)) if may_wait else None
        bound = (known or 0.0) * self._slowdown * AFTER_A_LOSS
        if bound:
            work = self._work(prefilling, shares([r.num_uncomputed for r in prefilling], self._limit))
            self._left_out_s += self._costs.seconds(work) or bound
        is_left_out = 0 < self._left_out_s <= bound
        if not is_left_out:
            self._left_out_s = 0.0
        return is_left_out

    def _work(self, prefilling: Sequence[Running], given: Sequence[int]) -> StepWork:
        ranges = [(r.prefilled, r.prefilled + share) for r, share in zip(prefilling, given, strict=True) if share]
        return StepWork.of((), ranges, self._blocks)

    def _fitting(self, alone: StepWork, seconds: float, prefilling: Sequence[Running]) -> int:
        uncomputed = [request.num_uncomputed for request in prefilling]
        most = min(self._limit, sum(uncomputed))
        given = shares(uncomputed, most)
        completed = sum(share == need for share, need in zip(given, uncomputed, strict=True))
        bound = seconds * self._slowdown * max(patience(alone.rows, prefilling), completed / alone.rows)

        def beside(tokens: int) -> float:
            chunks = self._work(prefilling, shares(uncomputed, tokens))
            return self._costs.seconds(alone.beside(chunks)) or seconds

        if beside(most) <= bound:
            return self._limit
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if beside(middle) <= bound else (low, middle)
        return max(self.at_least, low)

    def note_sent(self, number: int, decoding: Collection[Running], chunks: Sequence[Chunk]) -> None:
        # Nothing is learned from a step that also computes log-probabilities of prompts, which few requests want.
        if any(chunk.scored for chunk in chunks):
            return
        if self._slowdown and (chunks or number % SAMPLED_DECODE_STEPS == 0):
            self._sent[number] = StepWork.of(decoding, [(c.start, c.end) for c in chunks], self._blocks)

    def note_answered(self, number: int, seconds: float) -> None:
        """Step `number` took this long in the shards."""
        if (work := self._sent.pop(number, None)) is not None and seconds > 0:
            self._costs.learn(work, seconds)

    def void(self) -> None:
        """Forgets the steps that have not answered."""
        self._sent.clear()
