"""Servers of quantized weights in turns: this one and llama.cpp's on the same GGUF file (`text-generation-benchmark
gguf`); this one with weights in bfloat16 and in what `--quantize` makes of them (`quantized`); this one and vLLM's on
the same quantized checkpoint (`quantized --beside-vllm`)."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from text_generation_benchmark.checkpoint import write_checkpoint, write_tokenizer
from text_generation_benchmark.family_shapes import FAMILIES, write_family
from text_generation_benchmark.figures import percentile
from text_generation_benchmark.load import GenerateStream, LoadResult
from text_generation_benchmark.micro.random_files import OF_VLLM, write_model
from text_generation_benchmark.ours import running_ours
from text_generation_benchmark.output import table
from text_generation_benchmark.peers.servers import EVERY_CORE, LIBRARY, WRITER, llama_server, run_in, running_vllm
from text_generation_benchmark.process import exit_on_sigterm
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.shapes import SHAPES
from text_generation_benchmark.workload import PREFILL, Run, Workload, loads_on, take_turns

ONE = Workload(1, 64, 64)
BESIDE_LLAMA_CPP = ONE, replace(ONE, concurrency=8), replace(ONE, concurrency=16), PREFILL
BESIDE_BFLOAT16 = ONE, replace(ONE, concurrency=4), replace(ONE, concurrency=16), PREFILL
FEW_SLOTS = ("--max-batch-total-tokens", "8192")  # several servers of 3 billion weights share 24 GiB
IN_8_BITS = ("--activations", "int8")
# The flags of each server of quantized files, and of a checkpoint. The last one is what the others are compared with.
OF_A_FILE: Mapping[str, Sequence[str]] = {"ours": ("--activations", "model"), "ours, int8": IN_8_BITS}
OF_A_CHECKPOINT: Mapping[str, Sequence[str]] = {
    "int8": ("--quantize", "int8"),
    "int8, int8": ("--quantize", "int8", *IN_8_BITS),
    "int4": ("--quantize", "int4"),
    "int4, int8": ("--quantize", "int4", *IN_8_BITS),
    "bfloat16": (),
}


def beside_llama_cpp(
    environment: Path,
    model: str,
    kinds: Sequence[str],
    rounds: int,
    more: Sequence[str] = (),
    fork: Sequence[str] = (),
) -> str:
    """A table of tokens per second, of the prompt where it is the load. The checkpoint has random weights. `more`:
    flags of this server. `fork`: a fork's server, which is measured as well, and its flags."""
    exit_on_sigterm()
    rows: list[tuple[str, ...]] = []
    peers = {"fork": fork, "llama.cpp": ()} if fork else {"llama.cpp": ()}
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
        checkpoint, whole = Path(folder, model), Path(folder, "model.gguf")
        if model in FAMILIES:
            write_family(checkpoint, FAMILIES[model])
        else:
            write_checkpoint(checkpoint, SHAPES[model])
        run_in(environment, WRITER, checkpoint, whole)
        for kind in kinds:
            run_in(environment, LIBRARY, "quantize", whole, folder, kind)
            file = Path(folder, f"model-{kind}.gguf")
            with ExitStack() as servers:
                runs = _ours(servers, file, checkpoint, OF_A_FILE, more)
                most = max(workload.concurrency for workload in BESIDE_LLAMA_CPP)
                for name, instead in peers.items():
                    server = llama_server(environment, file, checkpoint, most, instead)
                    runs[name] = servers.enter_context(server)
                rows += ((kind, *row) for load in BESIDE_LLAMA_CPP for row in rows_of(load, runs, rounds))
            file.unlink()
    return table(("type", *columns_of([*OF_A_FILE, *peers])), rows)


def beside_bfloat16(model: str, rounds: int, more: Sequence[str] = ()) -> str:
    """The same of this server with weights in several forms. `more`: flags of all of them."""
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder, ExitStack() as servers:
        checkpoint = Path(folder, model)
        write_checkpoint(checkpoint, SHAPES[model])
        runs = _ours(servers, checkpoint, checkpoint, OF_A_CHECKPOINT, more)
        return table(columns_of(list(runs)), [row for load in BESIDE_BFLOAT16 for row in rows_of(load, runs, rounds)])


def beside_vllm(environment: Path, model: str, rounds: int, more: Sequence[str] = ()) -> str:
    """The same of quantized checkpoints of random codes, beside vLLM. `more`: flags of this server."""
    exit_on_sigterm()
    rows: list[tuple[str, ...]] = []
    for name in OF_VLLM:
        with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder, ExitStack() as servers:
            checkpoint, _ = write_model(Path(folder), name, SHAPES[model])
            write_tokenizer(checkpoint, SHAPES[model].vocabulary)
            runs = _ours(servers, checkpoint, checkpoint, OF_A_FILE, more)
            port, dialect = servers.enter_context(running_vllm(environment, checkpoint, EVERY_CORE))
            runs["vLLM-CPU"] = loads_on(port, dialect, Prompts(checkpoint))
            rows += ((name, *row) for load in BESIDE_BFLOAT16 for row in rows_of(load, runs, rounds))
    return table(("weights", *columns_of([*OF_A_FILE, "vLLM-CPU"])), rows)


def _ours(
    servers: ExitStack, model: Path, checkpoint: Path, flags: Mapping[str, Sequence[str]], more: Sequence[str]
) -> dict[str, Run]:
    """`checkpoint`: the folder with the tokenizer. `more`: flags of all these servers."""

    def started() -> Iterator[tuple[str, Run]]:
        for name, each in flags.items():
            port = servers.enter_context(running_ours(model, more=(*FEW_SLOTS, *each, *more))).port
            yield name, loads_on(port, GenerateStream(), Prompts(checkpoint))

    return dict(started())


def columns_of(names: Sequence[str]) -> tuple[str, ...]:
    return "load", *names, *(f"{name} ÷ {names[-1]}" for name in names[:-1])


def rows_of(workload: Workload, runs: Mapping[str, Run], rounds: int) -> list[tuple[str, ...]]:
    """The medians of all servers, and of the ratios of the rounds to the last server, with quartiles. Streams have two
    rows: tokens per second of the whole load, with its prompts, and of the time after the first tokens."""
    results = take_turns(runs, workload, rounds)
    streams, size = workload.concurrency, workload.input_tokens
    if workload.new_tokens == 1:
        load = f"{'a prompt' if streams == 1 else f'{streams} prompts'} of {size}"
        return [(load, *_cells(results, lambda result: streams * size / result.first_token_s))]
    load = f"{streams} stream{'s' * (streams > 1)}"
    return [
        (load, *_cells(results, lambda result: result.tokens_per_s)),
        (f"{load}, decoding", *_cells(results, lambda result: streams / result.per_token_s)),
    ]


def _cells(results: Mapping[str, Sequence[LoadResult]], speed: Callable[[LoadResult], float]) -> Iterator[str]:
    speeds = {name: [*map(speed, of_server)] for name, of_server in results.items()}
    yield from (f"{median(each):.1f}" for each in speeds.values())
    *others, last = speeds.values()
    for other in others:
        ratios = sorted(one / peer for one, peer in zip(other, last, strict=True))
        yield f"{median(ratios):.2f} ({percentile(ratios, 25):.2f} to {percentile(ratios, 75):.2f})"
