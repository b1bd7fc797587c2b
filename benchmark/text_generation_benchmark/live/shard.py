"""A shard without a model: it answers every step after a fixed time, with random tokens of a model's vocabulary.

Run as `python -m text_generation_benchmark.live.shard MODEL_FOLDER UDS_PATH STEP_S`; listens on unix://UDS_PATH-0.
STEP_S may be the file of a `SimulatedModel`: a step then takes what that model's steps cost, there are as many slots,
and every token is the same word.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer

from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.simulation.cost import SimulatedModel, StepCost
from text_generation_server.config import ShardConfig
from text_generation_server.errors import MatcherError
from text_generation_server.models.adapters import AdapterBank
from text_generation_server.runner import Capacity
from text_generation_server.server import Servicer, listen
from text_generation_server.step.results import Pending, StepOutput, completed
from text_generation_server.step.rows import PromptChunk, StepBatch
from text_generation_server.worker import Worker

SLOTS, MAX_TOTAL_TOKENS = 2**23, 2**15
TOKENS = 2**18  # number of random tokens; after the last, the first follows
NOTHING = torch.zeros(0)


class TimedRunner:
    """The methods of ModelRunner that a shard without a step log calls."""

    num_rows = 0
    longest_pause_s = 0.0
    measured = None
    has_kept_cache = False
    kept = None
    computed = ()

    def __init__(self, cost: StepCost, slots: int, token_ids: Sequence[int]) -> None:
        """`cost`: of rows and prompt tokens. What rows and prompts attend to is not known here."""
        if cost.kv_token_s or cost.prompt_position_s:
            raise ValueError("a pretended shard knows no cost of attention: kv_token_s and prompt_position_s must be 0")
        self._cost, self._slots = cost, slots
        chosen = torch.randint(len(token_ids), (TOKENS,), generator=torch.Generator().manual_seed(0))
        self._tokens = torch.tensor(token_ids, dtype=torch.int32)[chosen]
        self._logprobs = -torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))
        self._at = 0

    def warmup(self, *_: int | None, content: int, known_content: int) -> Capacity:
        return Capacity(self._slots, MAX_TOTAL_TOKENS)

    def take_piece(self) -> bool:
        return False

    def clear(self, batch_id: int | None) -> None:
        pass

    def filter(self, batch_id: int, keep: list[int]) -> list[int]:
        return keep

    def step(
        self, decoding: list[StepBatch], slots: torch.Tensor, new_batch_id: int, chunks: list[PromptChunk]
    ) -> Pending[StepOutput]:
        ids = [i for batch in decoding for i in batch.request_ids] + [c.request_id for c in chunks if c.last]
        rows = sum(len(batch.request_ids) for batch in decoding)
        if step_s := self._cost.seconds(rows, 0, sum(chunk.end - chunk.start for chunk in chunks)):
            time.sleep(step_s)
        at = self._at if self._at + len(ids) <= TOKENS else 0
        self._at = at + len(ids)
        here = slice(at, at + len(ids))
        logprobs = self._logprobs[here]
        output = StepOutput(
            new_batch_id, ids, ids, self._tokens[here], logprobs, top_counts=[], top_ids=NOTHING, top_logprobs=NOTHING,
            failures={}, forward_ns=1, sampling_ns=1,
        )  # fmt: skip
        return completed(output)


def make_runner(model: Path, tokenizer: Tokenizer, step: str) -> TimedRunner:
    """`step`: seconds, or the file of a SimulatedModel."""
    if Path(step).is_file():
        pretended = SimulatedModel.read(Path(step))
        return TimedRunner(pretended.cost, pretended.slots, [tokenizer.encode(Prompts(model).answer).ids[-1]])
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return TimedRunner(StepCost(float(step)), SLOTS, [i for i in range(tokenizer.get_vocab_size()) if i not in special])


async def serve(model: Path, uds_path: str, step: str) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    grammars: Future[None] = Future()
    grammars.set_exception(MatcherError("pretended shards follow no grammar"))
    runner = make_runner(model, tokenizer, step)
    facts = SimpleNamespace(vocab_size=tokenizer.get_vocab_size(), max_positions=MAX_TOTAL_TOKENS, eos_token_ids=())
    shard: Any = SimpleNamespace(
        runner=runner, tokenizer=tokenizer, model_config=facts, dtype=torch.float32, device=torch.device("cpu"),
        kernels="none", block_queries=1, queries_per_token=1, group=SimpleNamespace(rank=0),
        grammars=SimpleNamespace(prepare=lambda: grammars), adapters=AdapterBank(),
    )  # fmt: skip
    worker = Worker(epoch=1)
    servicer = Servicer([f"unix://{uds_path}-0"], worker)
    server = await listen(ShardConfig(model_path=model, uds_path=uds_path, rank=0, world_size=1, epoch=1), servicer)
    servicer.serve(shard)
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop(grace=None)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
