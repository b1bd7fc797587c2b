"""Functions that the ranks of test_tensor_parallel.py run. Each rank has its own runner, and sends it the steps that a
router would send.

Only rank 0 gets the tokens, so another rank's calls may depend on tokens only through a broadcast."""

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from collective_tasks import error_of
from grammar_tools import byte_compiler, regex_grammar
from shard_tools import BATCH, Client, fresh_client, generate, make_runner, random_ids, scattered_slots

from text_generation_common import faults
from text_generation_common.sampling import Sampling
from text_generation_server.distributed import Group
from text_generation_server.grammars.constraints import Constraints
from text_generation_server.kernels import reference
from text_generation_server.kernels.interface import Chosen, Kernels
from text_generation_server.runner import ModelRunner
from text_generation_server.step.rows import StepBatch

Text = tuple[list[int], list[float]]  # tokens and their log-probabilities
LENGTHS = [1, 17, 70]
CROWD = [1, 2, 15, 16, 17, 63, 65, 130]
NEW = 8
WITH_CUT = 3
CONSTRAINED_STEPS, FREE_STEPS = 20, 2
THREE_CHUNKS = [(1, 40, False), (40, 70, True)]  # what follows a first chunk of one token
SCORES = ("logprobs", "top_ids", "top_logprobs")


def warm(group: Group, path: Path) -> ModelRunner:
    runner = make_runner(path, group=group)
    runner.warmup(256, None, 16, None)
    return runner


def text(client: Client, request_id: int = 7) -> Text:
    return client.tokens.get(request_id, []), client.logprobs.get(request_id, [])


def greedy_texts(group: Group, path: Path, vocabulary: int) -> list[tuple[list[int], torch.Tensor]]:
    """On rank 0, for each prompt: the tokens, and for each of them the log-probabilities of all ids."""
    runner, texts = warm(group, path), []
    for length in LENGTHS:
        client = fresh_client(runner)
        ids = random_ids(length)
        outputs = [client.step([], [client.first_chunk(7, ids, parameters=Sampling(top_n_tokens=vocabulary))])]
        outputs += [client.step([7]) for _ in range(NEW - 1)]
        if group.rank == 0:
            rows = [torch.zeros(vocabulary).scatter_(0, o.top_ids.long(), o.top_logprobs) for o in outputs]
            texts.append((client.tokens[7], torch.stack(rows)))
    return texts


def prompt_scores(group: Group, path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On rank 0, log-probabilities of a prompt's tokens in three chunks, and the two most likely tokens in their
    places."""
    client, ids = _new_client(warm(group, path), seed=4), random_ids(70)
    first = client.first_chunk(7, ids, end=1, prompt_logprobs=2)
    outputs = [client.step([], [first]), *(client.step([], [type(first)(7, *chunk)]) for chunk in THREE_CHUNKS)]
    found = [output.prompts for output in outputs if output.prompts is not None]
    assert len(found) == (3 if group.rank == 0 else 0)
    arrays = [torch.cat([getattr(f, name) for f in found] or [torch.empty(0)]) for name in SCORES]
    return arrays[0], arrays[1], arrays[2]


def texts_in_company(group: Group, path: Path, parameters: Sampling) -> list[tuple[str, Text, Text]]:
    """On rank 0, a tuple for each other way to compute a text (such as a prompt in chunks): its name, the usual text,
    and the text that was computed in this way."""
    runner = warm(group, path)
    alone = [text(generate(runner, random_ids(n, n), NEW, parameters)) for n in CROWD]
    known = group.broadcast(torch.tensor(alone[-1][0] or [0] * NEW))
    found = list(zip(["crowd"] * len(CROWD), alone, _crowd(runner, parameters), strict=True))
    found.append(("chunks", alone[-1], _in_chunks(runner, parameters)))
    tokens, logprobs = alone[-1]
    found.append(("resume", (tokens[5:], logprobs[5:]), _resumed(runner, parameters, known[:5])))
    return found


def _crowd(runner: ModelRunner, parameters: Sampling) -> list[Text]:
    """Texts of eight requests: five start together, and the other three join later."""
    client = _new_client(runner, seed=1)
    chunks = [client.first_chunk(i, random_ids(n, n), parameters=parameters) for i, n in enumerate(CROWD)]
    client.step([], chunks[:5])
    client.step([0, 1, 2, 3, 4], chunks[5:])
    for _ in range(NEW - 2):
        client.step([0, 1, 2, 3, 4, 5, 6, 7])
    client.step([5, 6, 7])
    return [text(client, i) for i in range(len(CROWD))]


def _in_chunks(runner: ModelRunner, parameters: Sampling) -> Text:
    client, ids = _new_client(runner, seed=2), random_ids(CROWD[-1], CROWD[-1])
    first = client.first_chunk(7, ids, end=63, parameters=parameters)
    client.step([], [first])
    for start, end in pairwise([63, 65, 129, 130]):
        client.step([], [type(first)(7, start, end, end == 130)])
    for _ in range(NEW - 1):
        client.step([7])
    return text(client)


def _resumed(runner: ModelRunner, parameters: Sampling, output: torch.Tensor) -> Text:
    client, ids = _new_client(runner, seed=3), random_ids(CROWD[-1], CROWD[-1])
    history = torch.cat([ids, output])
    client.step([], [client.first_chunk(7, history, prompt_length=len(ids), parameters=parameters)])
    for _ in range(NEW - len(output) - 1):
        client.step([7])
    return text(client)


def _new_client(runner: ModelRunner, seed: int) -> Client:
    runner.clear(None)
    return Client(runner, scattered_slots(runner, seed))


class SplittingKernels:
    """The reference, but every draw is split over the ranks, if it can be."""

    def __init__(self) -> None:
        self.merges = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def splits_draws(self, part: int) -> bool:
        return True

    def merge_parts(self, parts: list[torch.Tensor], vocab_size: int) -> Chosen:
        self.merges += 1
        return reference.merge_parts(parts, vocab_size)


def texts_by_parts(group: Group, path: Path) -> tuple[int, list[Text]]:
    """How many steps merged the parts of all ranks, and on rank 0 the texts of a greedy and of a drawn request. A third
    request, for WITH_CUT steps, asks for a cut."""
    kernels = SplittingKernels()
    runner = make_runner(path, group=group, kernels=cast(Kernels, kernels))
    runner.warmup(256, None, 16, None)
    kernels.merges = 0
    client = _new_client(runner, seed=4)
    drawn, cut = Sampling(do_sample=True, temperature=1.3, seed=9), Sampling(do_sample=True, top_k=3)
    client.step([], [client.first_chunk(1, random_ids(9)), client.first_chunk(2, random_ids(17, 2), parameters=drawn)])
    client.step([1, 2])
    client.step([1, 2], [client.first_chunk(3, random_ids(5), parameters=cut)])
    for _ in range(WITH_CUT - 1):
        client.step([1, 2, 3])
    runner.filter(BATCH, [1, 2])
    for _ in range(NEW - 2 - WITH_CUT):
        client.step([1, 2])
    return kernels.merges, [text(client, 1), text(client, 2)] if group.rank == 0 else []


def constrained_texts(group: Group, path: Path) -> tuple[int, dict[int, list[int]]]:
    """How many steps merged the parts of all ranks, and on rank 0 the tokens of two requests with a grammar, which run
    beside one without. It is alone in the first step, and in the last FREE_STEPS."""
    kernels, constraints = SplittingKernels(), Constraints(byte_compiler(), torch.device("cpu"))
    runner = make_runner(path, group=group, kernels=cast(Kernels, kernels), constraints=constraints)
    runner.warmup(256, None, 16, None)
    kernels.merges = 0
    client, complete = _new_client(runner, seed=4), dict[int, list[int]]()
    client.step([], [client.first_chunk(1, random_ids(9))])
    asked = {
        2: Sampling(grammar=regex_grammar("[a-f]{3,9} (12|2026)")),
        3: Sampling(grammar=regex_grammar("(the|a)( name| age){2}"), do_sample=True, seed=3),
    }
    chunks = [client.first_chunk(i, random_ids(9, i), parameters=sampling) for i, sampling in asked.items()]
    for step in range(CONSTRAINED_STEPS):
        output = client.step([1, 2, 3] if step else [1], [] if step else chunks)
        assert not output.failures
        complete |= {i: list(client.tokens[i]) for i in output.complete_ids}
    runner.filter(BATCH, [1])
    for _ in range(FREE_STEPS):
        client.step([1])
    return kernels.merges, complete


def fail_to_prepare(group: Group, path: Path) -> tuple[str, Text, Text]:
    """Sends rank 1 a step with an unknown request. Returns the error, the text before, and the text after a
    ClearCache."""
    runner = warm(group, path)
    before = text(generate(runner, random_ids(20), NEW))
    known = [7, 8] if group.rank == 1 else [7]
    slots = torch.zeros(len(known), dtype=torch.int32)
    error = error_of(lambda: runner.step([StepBatch(BATCH, known)], slots, BATCH, []))
    return error, before, text(generate(runner, random_ids(20), NEW))


def fail_at(group: Group, path: Path, rules: str) -> str:
    """The error of a warm-up and a generation in which a fault is injected."""
    runner = make_runner(path, group=group)
    faults.setup(rules, rank=group.rank)
    try:
        return error_of(lambda: (runner.warmup(64, None, 4, None), generate(runner, random_ids(5), 2)))
    finally:
        faults.setup("")


def ask_for_too_much(group: Group, path: Path) -> str:
    runner = make_runner(path, group=group)
    return error_of(lambda: runner.warmup(64, None, 4, 2**40))


def outputs(group: Group, path: Path) -> tuple[list[int], list[int], int]:
    """The requests and tokens in a step's answer, and the bytes of one slot's keys and values."""
    runner = warm(group, path)
    client = Client(runner, scattered_slots(runner))
    output = client.step([], [client.first_chunk(7, random_ids(5))])
    assert client.step([7]).batch_request_ids == [7]
    cache = runner._kv_cache
    return output.request_ids, output.token_ids.tolist(), sum(layer.heads[0].nbytes for layer in cache)
