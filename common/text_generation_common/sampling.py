"""How the tokens of a request are chosen: one value that router and shard share, and the only place that declares its
parameters.

A parameter has the same name here, in proto/generate.proto and in the HTTP schemas, so that no code copies it by hand.
"""

from dataclasses import dataclass, fields, replace
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of a request. The defaults are neutral: they take the most likely token, and change no
    logit.
    """

    do_sample: bool = False  # True: draw the token; False: take the most likely token
    temperature: float = 1.0
    top_k: int = 0  # number of tokens to draw from; 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0  # least likelihood of a token, divided by the likelihood of the most likely token
    typical_p: float = 1.0
    seed: int = 0  # unsigned 64-bit number; the noise is a hash of (seed, position, token)
    repetition_penalty: float = 1.0  # applies to tokens of prompt and output
    frequency_penalty: float = 0.0  # applies to output tokens only
    watermark: bool = False
    top_n_tokens: int = 0  # number of most likely tokens that are returned with each token
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, number added to its logit), each token at most once
    presence_penalty: float = 0.0  # applies to output tokens only, to each once
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that can be chosen; (): all tokens can be chosen
    # Sequences of tokens that are not completed: the last token of a sequence cannot be chosen where prompt and output
    # end with the other tokens of the sequence.
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    # Number of output tokens until which none of `end_token_ids`, the tokens that end the text, can be chosen.
    min_new_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    grammar: str = ""  # the form of the output, as llguidance's JSON text of a grammar; "": free text

    @property
    def warps(self) -> bool:
        return _warpers(self) != _warpers(NEUTRAL)

    def without_warpers(self) -> "Sampling":
        return replace(self, **dict(zip(WARPERS, _warpers(NEUTRAL), strict=True)))


NEUTRAL = Sampling()
NAMES = tuple(field.name for field in fields(Sampling))
# Parameters that change or cut the distribution. As in TGI, a request for any of them is a request for sampling.
WARPERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_warpers = attrgetter(*WARPERS)
