"""Converts `Sampling` to and from protobuf. A field of `NextTokenChooserParameters` has the name of its parameter."""

from typing import Protocol

from text_generation_common.sampling import NAMES, Sampling
from text_generation_proto import generate_pb2 as pb

LISTS = ("allowed_token_ids", "end_token_ids")
# `top_n_tokens` is a field of `Request` itself, as in TGI. `logit_bias` and `bad_words_ids` have messages for their
# items.
SCALARS = tuple(name for name in NAMES if name not in (*LISTS, "top_n_tokens", "logit_bias", "bad_words_ids"))


class WithParameters(Protocol):
    """The first chunk of a request (generate.v1.Request), or a Submit of engine.v1."""

    top_n_tokens: int

    @property
    def parameters(self) -> pb.NextTokenChooserParameters: ...


def to_pb(sampling: Sampling, request: WithParameters) -> None:
    """Writes the parameters into a message."""
    wire = request.parameters
    for name in SCALARS:
        setattr(wire, name, getattr(sampling, name))
    for name in LISTS:
        getattr(wire, name).extend(getattr(sampling, name))
    wire.logit_bias.extend(pb.TokenBias(token=token, value=value) for token, value in sampling.logit_bias)
    wire.bad_words_ids.extend(pb.TokenIds(ids=ids) for ids in sampling.bad_words_ids)
    request.top_n_tokens = sampling.top_n_tokens


def from_pb(request: WithParameters) -> Sampling:
    wire = request.parameters
    named = {name: getattr(wire, name) for name in SCALARS} | {name: tuple(getattr(wire, name)) for name in LISTS}
    return Sampling(
        **named,
        top_n_tokens=request.top_n_tokens,
        logit_bias=tuple((bias.token, bias.value) for bias in wire.logit_bias),
        bad_words_ids=tuple(tuple(word.ids) for word in wire.bad_words_ids),
    )
