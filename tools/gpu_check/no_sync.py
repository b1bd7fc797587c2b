"""Nothing on the way of a step waits for the device: torch says which line does.

torch.cuda.set_sync_debug_mode covers torch's own calls, such as a copy from pageable memory. Without a GPU the steps
run and nothing is watched.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

import text_generation_server
from gpu_check.findings import Case, Context, Measured
from gpu_check.model import REHEARSED
from gpu_check.runners import SPARE, Player, RunnerLoad, make_runner
from text_generation_benchmark.shapes import LLAMA_8B
from text_generation_common.sampling import Sampling
from text_generation_server.grammars.compiler import GrammarCompiler, ModelTokens
from text_generation_server.grammars.constraints import Constraints
from text_generation_server.step.results import Pending, StepOutput
from text_generation_server.step.warmup import EVERY_OPTION

TABLE = "Lines that wait for the device within runner.step"
ROWS, CONTEXT = 10, 100
ANY_TEXT = Sampling(grammar=r'{"grammars": [{"lark_grammar": "start: /(.|\n)*/"}]}')
DEMO_TOKENIZER = Path(text_generation_server.__file__).parent / "demo_model" / "tokenizer.json"

# What torch warns of a call that waits. It warns once, in other words, that the watch itself is a prototype.
WAITED = "called a synchronizing CUDA operation"

Step = Callable[[], Pending[StepOutput]]


def watch_steps(context: Context) -> Iterator[Case]:
    shape = replace(LLAMA_8B, layers=2) if context.on_gpu else REHEARSED
    load = RunnerLoad(shape, ROWS, 2 * CONTEXT, 4 * CONTEXT, ROWS * (CONTEXT + SPARE))
    runner = make_runner(load, context.device, constraints=demo_constraints(shape.vocabulary, context.device))
    # The grammar of EVERY_OPTION cannot be compiled: its warm-up does not read it.
    options = replace(EVERY_OPTION, grammar="")
    player = Player(runner, load, sampling={1: options, 5: options, 7: ANY_TEXT})

    def watched(*steps: Step) -> Callable[[], Iterable[Measured]]:
        return lambda: waits(context, steps)

    def join(*requests: int, decoding: Sequence[int] = ()) -> Step:
        return lambda: player.launch(decoding, [player.chunk(request, CONTEXT) for request in requests])

    def score(*requests: int) -> Step:
        return lambda: player.launch([0], [player.chunk(request, CONTEXT, logprobs=5) for request in requests])

    def decode_7() -> Pending[StepOutput]:
        return player.launch([7])

    # The first step of each kind compiles and records, and torch may wait meanwhile.
    yield Case(
        TABLE, {"step": "the first of each kind, unwatched"}, lambda: unwatched(join(0, 1), join(2, decoding=[0]))
    )
    yield Case(TABLE, {"step": "two requests join"}, watched(join(3, 4)))
    yield Case(TABLE, {"step": "mixed: 4 rows decode, two requests join"}, watched(join(5, 6, decoding=[0, 1, 2, 3])))
    yield Case(TABLE, {"step": "decode, recorded"}, lambda: unwatched(lambda: player.launch([0, 1, 5, 6])))
    yield Case(
        TABLE, {"step": "decode: 4 rows, then 3"}, watched(*(lambda n=n: player.launch(range(n)) for n in (4, 3)))
    )
    yield Case(TABLE, {"step": "log-probabilities of a prompt, unwatched"}, lambda: unwatched(score(8)))
    yield Case(TABLE, {"step": "log-probabilities of a prompt"}, watched(score(9)))
    yield Case(TABLE, {"step": "a request with a grammar joins, and decodes"}, watched(join(7), *[decode_7] * 2))


def demo_constraints(vocabulary: int, device: torch.device) -> Constraints:
    """Grammars over the tokens of the demo model, which are the first ids of the vocabulary."""
    count = max(vocabulary, Tokenizer.from_file(str(DEMO_TOKENIZER)).get_vocab_size())
    return Constraints(GrammarCompiler(ModelTokens(DEMO_TOKENIZER.read_text(), count, (2,))), device)


def unwatched(*steps: Step) -> Iterable[Measured]:
    for step in steps:
        finished(step())
    yield Measured({"waits": "–"})


def finished(pending: Pending[StepOutput]) -> StepOutput:
    """The step's output. A request that fails, such as one whose grammar cannot be followed, fails the case."""
    output = pending.wait()
    if output.failures:
        raise RuntimeError(f"requests failed: {output.failures}")
    return output


def waits(context: Context, steps: Sequence[Step]) -> Iterable[Measured]:
    for step in steps:
        step_waits = _warned(step) if context.on_gpu else _plain(step)
        yield from step_waits


def _plain(step: Step) -> Iterable[Measured]:
    finished(step())
    yield Measured({"waits": "not watched: no GPU"})


def _warned(step: Step) -> Iterable[Measured]:
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            pending = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finished(pending)
    lines = Counter(f"{w.filename}:{w.lineno}" for w in caught if WAITED in str(w.message))
    if not lines:
        yield Measured({"waits": "none"})
    for line, times in lines.items():
        yield Measured({"waits": line}, failure=f"waits for the device {times} times")
