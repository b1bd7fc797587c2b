"""One number for everything a server says: `make digest`, before and after a change that must not alter any answer.

500 mixed requests, 32 at a time, float32, with too few token slots for all of them, and a shard killed half-way: the
digest covers every event of every stream (ids, texts, log-probabilities, top tokens, finish reasons). `--launcher`
asks another version's server. Exit status 1 where fewer than 21 requests were preempted. A server without compiled
kernels (an empty `kernels/cpu/built`) has the same digest only on processors where torch's products and ours round
alike.
"""

import argparse
import asyncio
import hashlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import processes
from calls import client_of, metrics
from mixed import STREAM_LIMIT_S, MixedAnswer, MixedAsk, answer_of, mixed_asks
from server_process import LAUNCHER, ServerProcess

NUM_ASKS, AT_ONCE = 500, 32
TOKENS = (20, 120)
# Fewer token slots than 32 of these requests need, so that running requests are preempted.
ARGUMENTS = ("--dtype", "float32", "--max-batch-total-tokens", "2560")
MIN_PREEMPTIONS = 20
# A prompt whose text ends by itself after a few tokens. Sent all the while, it makes the server expect texts that are
# shorter than max_new_tokens.
QUESTION = "<|user|>What is 2 + 3?</s><|assistant|>"


@dataclass(frozen=True, slots=True)
class Digest:
    num_shard: int
    sha256: str
    answers: int
    failed: Sequence[str]
    preemptions: int
    epochs: int  # newest epoch of the shards: 2 after one kill

    def failures(self) -> list[str]:
        found = list(self.failed)
        found += [f"{self.preemptions} preemptions only"] if self.preemptions <= MIN_PREEMPTIONS else []
        return found + (["the kill came too late"] if self.epochs < 2 else [])


def digest_of(num_shard: int, launcher: Path) -> Digest:
    asked = mixed_asks(NUM_ASKS, TOKENS)
    with ServerProcess("--num-shard", str(num_shard), *ARGUMENTS, launcher=launcher) as server:
        answers = asyncio.run(_all_answers(server, asked))
        [preemptions] = metrics(server.url, "tgi_request_preemptions")
        epochs = processes.epoch(processes.shards(server.pid)[0])
    fixed = [answer for answer in answers if asked[answer.ask].kind != "best_of"]  # best_of draws seeds
    lines = [line for answer in fixed for line in answer.outcome]
    failed = [f"{asked[answer.ask].kind}: {answer.error}" for answer in answers if answer.error]
    total = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Digest(num_shard, total, len(answers), failed, int(preemptions), epochs)


async def _all_answers(server: ServerProcess, asked: Sequence[MixedAsk]) -> list[MixedAnswer]:
    """The answers that the client received, in the order of `asked`."""
    answers: list[MixedAnswer] = []
    places = iter(range(len(asked)))

    async def send() -> None:
        for place in places:
            answers.append(await answer_of(client, asked, place))
            if len(answers) == len(asked) // 2:
                os.kill(processes.shards(server.pid)[0].pid, signal.SIGKILL)

    async def send_short_texts() -> None:
        body = {"inputs": QUESTION, "parameters": {"max_new_tokens": 400}}
        while len(answers) < len(asked):
            await client.post("/generate", json=body)

    async with client_of(server.url) as client, asyncio.TaskGroup() as tasks:
        client.timeout = STREAM_LIMIT_S
        for _ in range(AT_ONCE):
            tasks.create_task(send())
        for _ in range(AT_ONCE // 8):
            tasks.create_task(send_short_texts())
    return sorted(answers, key=lambda answer: answer.ask)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launcher", type=Path, default=LAUNCHER, help="another version's text-generation-launcher")
    asked = parser.parse_args()
    failures = []
    for num_shard in (1, 2):
        digest = digest_of(num_shard, asked.launcher)
        print(digest, flush=True)
        failures += digest.failures()
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
