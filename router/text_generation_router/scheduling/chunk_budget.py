"""How many prompt tokens a step carries beside streams.

Streams get one token from each step, so a step that computes a long chunk of a prompt keeps them all waiting.
"""

from collections.abc import Collection, Sequence

from text_generation_router.scheduling.chunks import shares
from text_generation_router.scheduling.costs import SINGLE_QUERIES, QueryBlocks, StepCosts, StepWork
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.step import Chunk

# A step beside streams carries at least this many prompt tokens, whatever they cost: fewer would each cost much more,
# because a chunk's keys are read once for all its tokens. The CPU kernels compute shorter chunks token by token. If
# more tokens than these fit into a block of queries, it carries those of a block: fewer would save little time.
FEWEST_TOKENS = 8
# Steps without chunks are alike: the costs are learned from one of this many. It is not a power of two: work that comes
# with every eighth step would be in all samples or in none.
SAMPLED_DECODE_STEPS = 5


class ChunkBudget:
    """The prompt tokens of a step. Without decoding rows, and while costs are not known, these are all that the limit
    allows. Beside streams, a step takes at most `slowdown` times as long as it would take without chunks; 0: any time.
    It has a block's tokens, or FEWEST_TOKENS if they are more, even where they take longer.

    If a step of full size would complete more prompts than there are streams, it may take longer in the same ratio:
    more requests wait for their first token than for their next one.
    """

    def __init__(self, limit: int, slowdown: float, costs: StepCosts) -> None:
        self.newest = limit  # the most prompt tokens of the last step that had any
        self.at_least = min(limit, FEWEST_TOKENS) if slowdown else limit  # what every step can carry
        self._limit = limit
        self._slowdown = slowdown
        self._costs = costs
        self._blocks = SINGLE_QUERIES
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

    def _fitting(self, alone: StepWork, seconds: float, prefilling: Sequence[Running]) -> int:
        uncomputed = [request.num_uncomputed for request in prefilling]
        most = min(self._limit, sum(uncomputed))
        given = shares(uncomputed, most)
        completed = sum(share == need for share, need in zip(given, uncomputed, strict=True))
        bound = seconds * self._slowdown * max(1.0, completed / alone.rows)

        def beside(tokens: int) -> float:
            ranges = zip(prefilling, shares(uncomputed, tokens), strict=True)
            chunks = StepWork.of((), [(r.prefilled, r.prefilled + share) for r, share in ranges if share], self._blocks)
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
