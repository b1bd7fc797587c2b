"""Plays the router for requests with a grammar on one runner: step by step, or at random with two steps in flight."""

import json
import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import torch
from grammar_tools import END, PERSON, byte_compiler, byte_level_tokenizer, lark_grammar, regex_grammar, schema_grammar
from shard_tools import BATCH, CPU, Client, make_runner, random_ids, scattered_slots

from text_generation_common.sampling import Sampling
from text_generation_server.grammars.constraints import Constraints
from text_generation_server.runner import ModelRunner
from text_generation_server.step.results import Pending, StepOutput
from text_generation_server.step.rows import PromptChunk, StepBatch

TOKENIZER = byte_level_tokenizer()
MAX_FREE = 30  # maximum number of tokens of a request without a grammar
MOST = 120  # maximum number of tokens of a text in any of these grammars
SUM = lark_grammar(r"""
start: number (" " operator " " number){1,3}
number: /[1-9][0-9]{0,2}/
operator: "+" | "-" | "times"
""")
GRAMMARS = {"schema": schema_grammar(PERSON), "regex": regex_grammar(r"[a-f]{3,9} é(12|2026)(, the)?"), "lark": SUM}
DRAWN = Sampling(do_sample=True, seed=11, temperature=1.0)
GREEDY = Sampling()


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


FOLLOWS: dict[str, Callable[[str], object]] = {
    "schema": is_person,
    "regex": lambda text: re.fullmatch(r"[a-f]{3,9} é(12|2026)(, the)?", text),
    "lark": lambda text: re.fullmatch(r"[1-9][0-9]{0,2}( (\+|-|times) [1-9][0-9]{0,2}){1,3}", text),
}


def make_constrained(path: Path, **options: Any) -> ModelRunner:
    return make_runner(path, constraints=Constraints(byte_compiler(**options), CPU))


@dataclass
class Router:
    """Plays the router for one runner: ends requests whose grammar is complete, and those that failed."""

    runner: ModelRunner
    client: Client = field(init=False)
    failures: dict[int, str] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner.clear(None)
        self.client = Client(self.runner, scattered_slots(self.runner))

    def step(self, chunks: list[PromptChunk] | None = None) -> StepOutput:
        output = self.client.step(list(self.running), chunks)
        self.running += [chunk.request_id for chunk in chunks or [] if chunk.last]
        self.failures |= output.failures
        self.complete += output.complete_ids
        gone = {*output.failures, *output.complete_ids} & set(self.running)
        if gone:
            self.running = [i for i in self.running if i not in gone]
            if self.running:
                self.runner.filter(BATCH, self.running)
            else:
                self.runner.clear(BATCH)
        return output

    def join(self, asked: dict[int, Sampling], prompt: int = 9) -> StepOutput:
        return self.step([self.client.first_chunk(i, random_ids(prompt, i), parameters=s) for i, s in asked.items()])

    def run(self, asked: dict[int, Sampling], prompt: int = 9) -> "Router":
        """Runs prompts together to the ends of their grammars, or for MOST tokens."""
        self.join(asked, prompt)
        for _ in range(MOST - 1):
            if not any(asked[i].grammar for i in self.running):
                break
            self.step()
        return self

    def tokens(self, request_id: int) -> list[int]:
        return self.client.tokens[request_id]

    def text(self, request_id: int) -> str:
        return TOKENIZER.decode([token for token in self.tokens(request_id) if token != END])


def with_grammar(sampling: Sampling, name: str, **others: Any) -> Sampling:
    return replace(sampling, grammar=GRAMMARS.get(name, name), **others)


class Schedule:
    """Plays the router with up to two steps in flight. At random, requests join, pause, are preempted and join again
    with the tokens that are confirmed; a request ends when its grammar is complete or it has MAX_FREE tokens."""

    def __init__(self, runner: ModelRunner, asked: dict[int, Sampling], seed: int) -> None:
        runner.clear(None)
        self.rng, self.runner, self.asked = random.Random(seed), runner, asked
        self.client = Client(runner, scattered_slots(runner))
        self.tokens: dict[int, list[int]] = {i: [] for i in asked}
        self.waiting, self.running, self.done = list(asked), list[int](), set[int]()
        self.leaving: list[int] = []  # preempted; their rows go when no step is in flight
        self.in_flight: deque[Pending[StepOutput]] = deque()

    def run(self) -> dict[int, list[int]]:
        while len(self.done) < len(self.asked):
            if len(self.in_flight) == 2 or (self.in_flight and self.rng.random() < 0.4):
                self.read()
            else:
                self.launch()
        return self.tokens

    def read(self) -> None:
        output = self.in_flight.popleft().wait()
        assert not output.failures
        for request_id, token in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            if request_id in self.done:
                continue
            self.tokens[request_id].append(token)
            is_free = not self.asked[request_id].grammar
            if request_id in output.complete_ids or (is_free and len(self.tokens[request_id]) == MAX_FREE):
                self.done.add(request_id)

    def launch(self) -> None:
        if self.running and self.rng.random() < 0.15:
            victim = self.rng.choice(self.running)
            self.running.remove(victim)
            self.leaving.append(victim)
        self.drop()
        decoding = [i for i in self.running if i not in self.done and self.rng.random() < 0.8]
        self.rng.shuffle(decoding)
        chunks = [self.joined(i) for i in list(self.waiting) if not self.leaving and self.rng.random() < 0.4]
        if decoding or chunks:
            batches = [StepBatch(BATCH, decoding)] if decoding else []
            self.in_flight.append(self.runner.step(batches, self.client.take(len(decoding)), BATCH, chunks))
            self.running += [chunk.request_id for chunk in chunks]

    def drop(self) -> None:
        """Once all steps that carry them have answered, rows of requests that have left go, and the requests wait."""
        gone = [i for i in (*self.leaving, *self.running) if i in self.leaving or i in self.done]
        while gone and self.in_flight:
            self.read()
        if gone:
            self.waiting += [i for i in self.leaving if i not in self.done]
            self.running = [i for i in self.running if i not in gone]
            self.leaving = []
            self.runner.filter(BATCH, self.running) if self.running else self.runner.clear(BATCH)

    def joined(self, request_id: int) -> PromptChunk:
        self.waiting.remove(request_id)
        history = torch.cat([random_ids(9, request_id), torch.tensor(self.tokens[request_id], dtype=torch.int64)])
        return self.client.first_chunk(request_id, history, prompt_length=9, parameters=self.asked[request_id])
