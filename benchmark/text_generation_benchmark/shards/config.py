"""The settings of the shard benchmark, checked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from text_generation_common.flags.requests import RequestFlags
from text_generation_common.sampling import NEUTRAL, Sampling
from text_generation_router.errors import StartError, ValidationError
from text_generation_router.text.validation import (
    AskedParameters,
    AskedSampling,
    RequestLimits,
    parameter_checks,
    raise_first,
    sampling,
)

OFF_WHEN_NEUTRAL = ("top_k", "top_p", "typical_p")


@dataclass(frozen=True, slots=True)
class Plan:
    """The rounds to run. Each request has a prompt of `sequence_length` tokens and generates `decode_length`."""

    batch_sizes: tuple[int, ...]
    sequence_length: int
    decode_length: int
    runs: int  # measured rounds for each batch size
    warmups: int  # unmeasured rounds before the measured ones, for each batch size
    sampling: Sampling

    @property
    def decode_steps(self) -> int:
        """Decode steps of a round: one less than the generated tokens, because the prefill makes the first token."""
        return self.decode_length - 1

    @property
    def slots_each(self) -> int:
        """Token slots of one request. The last token needs no slot, because no step takes it as input."""
        return self.sequence_length + self.decode_steps

    @property
    def rounds_each(self) -> int:
        return self.warmups + self.runs


def make_plan(
    batch_sizes: Sequence[int], sequence_length: int, decode_length: int, runs: int, warmups: int, asked: AskedSampling
) -> Plan:
    """Raises StartError for settings that cannot be measured."""
    if decode_length < 2:
        raise StartError("--decode-length must be at least 2: the first token comes from the prefill")
    checked = _checked(asked, sequence_length, sequence_length + decode_length)
    return Plan(tuple(dict.fromkeys(batch_sizes)), sequence_length, decode_length, runs, warmups, checked)


def _checked(asked: AskedSampling, prompt: int, longest: int) -> Sampling:
    # TGI's benchmark accepts top_k 0, top_p 1.0 and typical_p 1.0 as "off"; the router's checks refuse them.
    off = {name for name in OFF_WHEN_NEUTRAL if getattr(asked.values, name) == getattr(NEUTRAL, name)}
    asked = replace(asked, given=asked.given - off | {"seed"})
    flags = RequestFlags(max_best_of=1, max_stop_sequences=0, max_top_n_tokens=asked.values.top_n_tokens)
    limits = RequestLimits(flags, prompt, longest, vocab_size=0, eos_token_ids=())  # no flag names a token
    try:
        raise_first(parameter_checks(AskedParameters(asked), limits))
    except ValidationError as error:
        raise StartError(str(error)) from None
    return sampling(asked)
