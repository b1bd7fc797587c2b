"""Shards that are killed in the middle of steps, one after the other, each with the keys and values of the one before.

    make test-kept ARGS="--kills 2000"

Some requests at a time go on from shard to shard, from the tokens whose steps have answered. Once they have ended, the
keys and values of all of them are compared, bit by bit, with those of a process that computes them at once and is not
killed: in float32, in which chunks and single tokens have equal bits. Each line counts the kills that came while a step
was computed, which are the only ones of --kills. Exit status 1 if anything differs.
"""

import argparse
import ctypes
import json
import mmap
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from shard_tools import BATCH, CPU, make_checkpoint, make_runner

from text_generation_common.sampling import Sampling
from text_generation_server.device.kept import KeptMemory
from text_generation_server.kernels import select_backend
from text_generation_server.runner import Capacity, Measured, ModelRunner
from text_generation_server.step.rows import PromptChunk, StepBatch

# A model whose steps are computed in kernels for most of their time.
SIZES = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2)
REQUESTS, PROMPT, LENGTH, CHUNK, SLOTS = 4, 150, 260, 64, 2048
ASKED = (CHUNK, None, 8, SLOTS, None)
MAX_AGE_S = 0.1  # after its first step, of a shard that is killed
PREPARING, IN_STEP, BETWEEN = range(3)
SAMPLED = Sampling(do_sample=True, temperature=0.9, seed=5)


@dataclass
class Asked:
    """A request as the router knows it."""

    ids: list[int]  # the prompt, and the tokens of answered steps
    slots: list[int]  # slots of all positions up to LENGTH
    num_computed: int = 0  # first tokens whose keys and values an answered step has computed


@dataclass
class World:
    """What the process knows that forks the shards."""

    runner: ModelRunner
    kept: KeptMemory = field(default_factory=KeptMemory)
    # What a shard is doing, in shared memory: PREPARING, IN_STEP or BETWEEN steps.
    phase: "ctypes.c_uint64" = field(default_factory=lambda: ctypes.c_uint64.from_buffer(mmap.mmap(-1, mmap.PAGESIZE)))
    content: int = 0

    def fork(self, act: Callable[[int], None]) -> tuple[int, int]:
        """Process id of a child that calls `act` with a pipe, and its other end."""
        read, write = os.pipe()
        if pid := os.fork():
            os.close(write)
            return pid, read
        try:
            act(write)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def serve(self, requests: list[Asked], report: int) -> None:
        """One shard, and the part of the router that sends steps: each is reported when the next one was computed."""
        runner, known = self.runner, self.content
        runner.kept, runner.measured = self.kept, Measured(ASKED, Capacity(SLOTS, LENGTH), 0.1)
        runner.warmup(CHUNK, None, 8, SLOTS, content=known + 1, known_content=known)
        assert runner.has_kept_cache == (known > 0)
        waiting = dict(enumerate(requests))
        decoding: list[int] = []
        positions = {i: request.num_computed for i, request in waiting.items()}
        unreported: dict[int, list[int]] | None = None
        while waiting:
            chunks = []
            for i in [i for i in waiting if i not in decoding]:
                asked, start = waiting[i], positions[i]
                end = min(len(asked.ids), start + CHUNK)
                first = start == asked.num_computed
                ids = torch.tensor(asked.ids, dtype=torch.int32) if first else None
                slots = torch.tensor(asked.slots[: len(asked.ids)], dtype=torch.int32) if first else None
                is_last = end == len(asked.ids)
                chunks.append(PromptChunk(i, start, end, is_last, ids, slots, PROMPT, SAMPLED, None))
                positions[i] = end
            slots = torch.tensor([waiting[i].slots[positions[i]] for i in decoding], dtype=torch.int32)
            for i in decoding:
                positions[i] += 1
            self.phase.value = IN_STEP
            step = runner.step([StepBatch(BATCH, decoding)] if decoding else [], slots, BATCH, chunks)
            self.phase.value = BETWEEN
            output = step.wait()
            tokens = dict(zip(output.request_ids, output.token_ids.tolist(), strict=True))
            answered = {i: [positions[i], tokens.get(i, -1)] for i in [*decoding, *(c.request_id for c in chunks)]}
            if unreported is not None:
                os.write(report, json.dumps(unreported).encode() + b"\n")
            unreported = answered
            decoding = [*decoding, *(chunk.request_id for chunk in chunks if chunk.last)]
            ended = [i for i in decoding if positions[i] >= LENGTH - 1]
            if ended:
                decoding = [i for i in decoding if i not in ended]
                for i in ended:
                    del waiting[i]
                if waiting:
                    runner.filter(BATCH, list(waiting))
        os.write(report, json.dumps(unreported).encode() + b"\n")

    def compare(self, requests: list[Asked], report: int) -> None:
        """Reports the positions whose keys or values differ from those of a shard that computes all tokens at once."""
        old = self.kept
        old.begin(again=True)
        self.runner.measured = None
        runner = self.runner
        found = runner._model.make_cache(SLOTS, 8, runner._kv_dtype, old.tensor)
        runner.warmup(LENGTH, None, 8, SLOTS)
        for i, asked in enumerate(requests):
            ids, slots = (
                torch.tensor(part[: asked.num_computed], dtype=torch.int32) for part in (asked.ids, asked.slots)
            )
            runner.step(
                [], slots[:0], BATCH, [PromptChunk(i, 0, len(ids), True, ids, slots, PROMPT, SAMPLED, None)]
            ).wait()
            runner.clear(BATCH)
            for layer, (one, other) in enumerate(zip(found, runner._kv_cache, strict=True)):
                for a, b in ((one.heads, other.heads), (one.scales, other.scales)):
                    if a is not None and b is not None and not torch.equal(a[slots.long()], b[slots.long()]):
                        os.write(report, f"request {i}, layer {layer}: other keys or values\n".encode())

    def note(self, requests: list[Asked], line: bytes) -> None:
        for i, (position, token) in json.loads(line).items():
            requests[int(i)].num_computed = position
            if token >= 0:
                requests[int(i)].ids.append(token)


def read_all(fd: int) -> bytes:
    with open(fd, "rb") as pipe:
        return pipe.read()


def run(kills: int, seed: int, kv_dtype: torch.dtype | None, folder: Path) -> list[str]:
    """Lines about what differs after this number of kills in the middle of steps."""
    draw, backend = random.Random(seed), select_backend(CPU)
    with ThreadPoolExecutor(1) as pool:  # threads of kernels end with the thread that has used them
        make = dict(kernels=backend.kernels, kv_dtype=kv_dtype, max_total_tokens=LENGTH)
        runner = pool.submit(make_runner, folder, **make).result()  # type: ignore[arg-type]
    backend.end_threads()
    world, done, all_kills, problems = World(runner), 0, 0, []
    while done < kills and not problems:
        slots = draw.sample(range(SLOTS), REQUESTS * LENGTH)
        requests = [
            Asked([draw.randrange(3, 320) for _ in range(PROMPT)], slots[i * LENGTH : (i + 1) * LENGTH])
            for i in range(REQUESTS)
        ]
        while left := [request for request in requests if request.num_computed < LENGTH - 1]:
            world.phase.value = PREPARING
            pid, pipe = world.fork(lambda report: world.serve(left, report))
            age_s = draw.random() * MAX_AGE_S
            if done < kills:
                while world.phase.value == PREPARING and not select.select([pipe], [], [], 0.001)[0]:
                    pass
                time.sleep(age_s)
                os.kill(pid, signal.SIGSTOP)
                done, all_kills = done + (world.phase.value == IN_STEP), all_kills + 1
                os.kill(pid, signal.SIGKILL)
            for line in read_all(pipe).split(b"\n")[:-1]:
                world.note(left, line)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status not in (0, -signal.SIGKILL):
                return [f"a shard ended with status {status}"]
            world.content = world.kept.content
        pid, pipe = world.fork(lambda report: world.compare(requests, report))  # noqa: B023
        problems = read_all(pipe).decode().splitlines()
        if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            problems.append(f"the comparison ended with status {status}")
        print(f"{done} kills in steps of {all_kills} kills: {'; '.join(problems) or 'no bit differs'}", flush=True)
    return problems


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="A checkpoint with the vocabulary of make_checkpoint.")
    arguments = parser.parse_args()
    problems = []
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.model or made_checkpoint(Path(made))
        for kv_dtype in (None, torch.int8):
            problems += run(-(-arguments.kills // 2), arguments.seed, kv_dtype, folder)
    sys.exit("; ".join(problems) or 0)


def made_checkpoint(folder: Path) -> Path:
    """Made by another process, because transformers starts threads."""
    if not (pid := os.fork()):
        with suppress(BaseException):
            make_checkpoint(folder, **SIZES)
            os._exit(0)
        os._exit(1)
    assert not os.waitpid(pid, 0)[1]
    return folder


if __name__ == "__main__":
    main()
