"""Converts `Sampling` to and from protobuf. A field of `NextTokenChooserParameters` has the name of its parameter."""

from text_generation_common.sampling import NAMES, Sampling
from text_generation_proto import generate_pb2 as pb

# `top_n_tokens` is a field of `Request` itself, as in TGI, and `bias` has messages for its pairs.
SCALARS = tuple(name for name in NAMES if name not in ("top_n_tokens", "bias"))


def to_pb(sampling: Sampling, request: pb.Request) -> None:
    """Writes the parameters into the first chunk of a request."""
    wire = request.parameters
    for name in SCALARS:
        setattr(wire, name, getattr(sampling, name))
    wire.bias.extend(pb.TokenBias(token=token, value=value) for token, value in sampling.bias)
    request.top_n_tokens = sampling.top_n_tokens


def from_pb(request: pb.Request) -> Sampling:
    wire = request.parameters
    return Sampling(
        **{name: getattr(wire, name) for name in SCALARS},
        top_n_tokens=request.top_n_tokens,
        bias=tuple((bias.token, bias.value) for bias in wire.bias),
    )
