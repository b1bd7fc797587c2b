"""Log-probabilities of a prompt in pieces that fit into messages."""

from collections.abc import Iterator

import numpy as np

from text_generation_proto import engine_pb2 as pb
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.wire.version import FLOAT32, INT32, WireError, packed, unpacked

PIECE_BYTES = 2**20


def pieces_of(index: int, known: PromptLogprobs) -> Iterator[pb.Prompt]:
    """`known`: from the prompt's second token on. A prompt of one token has no piece."""
    num_top = known.top_ids_PK.shape[1]
    rows = max(1, PIECE_BYTES // (4 + 8 * num_top))
    for start in range(0, len(known), rows):
        part = slice(start, start + rows)
        yield pb.Prompt(
            index=index,
            start=start + 1,
            logprobs=packed(known.logprobs_P[part], FLOAT32),
            num_top=num_top,
            top_ids=packed(known.top_ids_PK[part], INT32),
            top_logprobs=packed(known.top_logprobs_PK[part], FLOAT32),
        )


def logprobs_of(piece: pb.Prompt) -> PromptLogprobs:
    """Raises WireError for arrays that do not fit together."""
    logprobs_P = unpacked("logprobs", piece.logprobs, FLOAT32)
    count, num_top = len(logprobs_P), piece.num_top
    if not count:
        raise WireError("a Prompt has no log-probabilities")
    top_ids = unpacked("top_ids", piece.top_ids, INT32, count * num_top)
    top_logprobs = unpacked("top_logprobs", piece.top_logprobs, FLOAT32, count * num_top)
    shape = count, num_top
    return PromptLogprobs(
        logprobs_P.astype(np.float32, copy=False),
        top_ids.astype(np.int32, copy=False).reshape(shape),
        top_logprobs.astype(np.float32, copy=False).reshape(shape),
    )
