"""The settings of the shard benchmark, checked."""

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


@dataclass(frozen=True, slots=True)
class ShardBenchmarkConfig:
    tokenizer_name: str  # a local directory or a hub id
    revision: str  # revision of the model on the hub
    master_shard_uds_path: str
    batch_sizes: tuple[int, ...]
    sequence_length: int
    decode_length: int
    runs: int
    warmups: int
    asked: AskedSampling

    def plan(self) -> Plan:
        """The rounds to run. Raises StartError for settings that cannot be measured."""
        if self.decode_length < 2:
            raise StartError("--decode-length must be at least 2: the first token comes from the prefill")
        return Plan(
            tuple(dict.fromkeys(self.batch_sizes)),
            self.sequence_length,
            self.decode_length,
            self.runs,
            self.warmups,
            self._sampling(),
        )

    def _sampling(self) -> Sampling:
        # TGI's benchmark accepts top_k 0, top_p 1.0 and typical_p 1.0 as "off"; the router's checks refuse them.
        values = self.asked.values
        off = {name for name in OFF_WHEN_NEUTRAL if getattr(values, name) == getattr(NEUTRAL, name)}
        asked = replace(self.asked, given=self.asked.given - off | {"seed"})
        longest = self.sequence_length + self.decode_length
        limits = RequestLimits(
            RequestFlags(max_best_of=1, max_stop_sequences=0, max_top_n_tokens=values.top_n_tokens),
            self.sequence_length,
            longest,
            vocab_size=0,  # no flag names a token
            eos_token_ids=(),
        )
        try:
            raise_first(parameter_checks(AskedParameters(asked), limits))
        except ValidationError as error:
            raise StartError(str(error)) from None
        return sampling(asked)
