"""Log-probabilities of the tokens of one prompt: the values that a chunk gives, and all that are known."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.memory.trails import Ids

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """The log-probabilities of P consecutive tokens of a prompt, and the K most likely tokens in the place of each."""

    logprobs_P: Float32s
    top_ids_PK: Ids
    top_logprobs_PK: Float32s

    def __len__(self) -> int:
        return len(self.logprobs_P)

    @property
    def are_finite(self) -> bool:
        return bool(np.isfinite(self.logprobs_P).all())

    def without_first(self, count: int) -> "PromptLogprobs":
        return PromptLogprobs(self.logprobs_P[count:], self.top_ids_PK[count:], self.top_logprobs_PK[count:])

    @classmethod
    def joined(cls, parts: Sequence["PromptLogprobs"]) -> "PromptLogprobs":
        if not parts:
            return cls(np.empty(0, np.float32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))
        return cls(
            np.concatenate([part.logprobs_P for part in parts]),
            np.concatenate([part.top_ids_PK for part in parts]),
            np.concatenate([part.top_logprobs_PK for part in parts]),
        )


class KnownLogprobs:
    """The log-probabilities of a prompt that answered steps have given. They are known from the prompt's second token
    on, in order: the first token follows nothing, so it has none."""

    def __init__(self, prompt_length: int) -> None:
        self.count = 0  # number of tokens whose log-probability is known
        self._wanted = prompt_length - 1
        self._parts: list[PromptLogprobs] = []

    @property
    def are_complete(self) -> bool:
        return self.count >= self._wanted

    def add(self, start: int, given: PromptLogprobs) -> None:
        """Adds what a chunk from position `start` on has given: the values of the tokens that follow its own, from
        position start + 1 on. Values that are known already are left out."""
        assert start <= self.count, "a chunk begins after tokens whose log-probabilities are not known"
        if len(new := given.without_first(self.count - start)):
            self._parts.append(new)
            self.count += len(new)

    def joined(self) -> PromptLogprobs:
        return PromptLogprobs.joined(self._parts)
