"""What others need for the same work on the same GPU: torch's attention, a compiled loop, transformers."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_check.findings import Case, Context, Measured
from gpu_check.model import REHEARSED
from gpu_check.runners import SPARE, Player, RunnerLoad, make_runner
from gpu_check.states import backends, int32, random_layer, random_table
from gpu_check.static_loop import StaticLoop
from gpu_check.timing import event_seconds, seconds_per_call
from text_generation_benchmark.shapes import LLAMA_8B, LlamaShape
from text_generation_server.kernels.interface import AttentionOptions, Segments

ATTENTION, LOOP = "Peers: attention", "Peers: a decode step"
LAYERS = 8  # number of layers of the compared models: compiling all 32 takes minutes
STEPS = 20
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}


@dataclass(frozen=True, slots=True)
class PeerSizes:
    shape: LlamaShape
    prompt: int
    rows: int
    context: int
    dtype: torch.dtype
    backends: tuple[str, ...]


ON_GPU = PeerSizes(
    shape=replace(LLAMA_8B, layers=LAYERS),
    prompt=4096,
    rows=64,
    context=1000,
    dtype=torch.bfloat16,
    backends=("flash", "cuDNN"),
)
# Triton's interpreter computes bfloat16 wrongly.
REHEARSAL = PeerSizes(shape=REHEARSED, prompt=40, rows=2, context=20, dtype=torch.float16, backends=("math",))


def measure(context: Context) -> Iterator[Case]:
    sizes = ON_GPU if context.on_gpu else REHEARSAL
    yield Case(ATTENTION, {"of": "prefill"}, partial(prefill, context, sizes))
    yield Case(ATTENTION, {"of": "decode"}, partial(decode, context, sizes))
    for rows in (1, sizes.rows):
        yield Case(LOOP, {"rows": str(rows)}, partial(step, context, sizes, rows))
    yield Case(LOOP, {"rows": "1, transformers"}, partial(transformers_step, context, sizes))


def prefill(context: Context, sizes: PeerSizes) -> Iterable[Measured]:
    shape, tokens, device = sizes.shape, sizes.prompt, context.device
    triton, _ = backends()
    layer = random_layer(tokens, shape.kv_heads, shape.head_size, sizes.dtype, device)
    q = torch.randn(tokens, shape.heads, shape.head_size, device=device).to(sizes.dtype)
    segments, none = (
        Segments(int32([0], device), int32([0], device), int32([0, tokens], device), tokens),
        int32([], device),
    )
    table = random_table(1, tokens, tokens, device)
    options = AttentionOptions(shape.head_size**-0.5)
    what = f"a prompt of {tokens}"
    ours = seconds_per_call(
        [lambda: triton.attend(q, layer, table, rows_R=none, lengths_R=none, segments=segments, options=options)],
        device,
    )
    yield Measured({"what": f"{what}: ours", "µs": f"{1e6 * ours:.1f}", "times ours": "1.00"})
    keys, values = (part.transpose(0, 1).unsqueeze(0).contiguous() for part in layer.heads[:tokens].chunk(2, dim=1))
    queries = q.transpose(0, 1).unsqueeze(0).contiguous()

    def call() -> Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    yield from sdpa(context, sizes, what, call, ours)


def decode(context: Context, sizes: PeerSizes) -> Iterable[Measured]:
    """torch's attention has no token slots: keys and values are gathered first, or already lie where it wants them."""
    shape, rows, length, device = sizes.shape, sizes.rows, sizes.context, context.device
    triton, _ = backends()
    layer = random_layer(rows * length, shape.kv_heads, shape.head_size, sizes.dtype, device)
    table = random_table(rows, length, length, device)
    q = torch.randn(rows, shape.heads, shape.head_size, device=device).to(sizes.dtype)
    numbers, lengths = torch.arange(rows, dtype=torch.int32, device=device), int32([length] * rows, device)
    options = AttentionOptions(shape.head_size**-0.5)
    what = f"{rows} rows of {length}"
    ours = seconds_per_call(
        [lambda: triton.attend(q, layer, table, rows_R=numbers, lengths_R=lengths, segments=None, options=options)],
        device,
    )
    yield Measured({"what": f"{what}: ours", "µs": f"{1e6 * ours:.1f}", "times ours": "1.00"})
    slots = table.flatten().long()

    def gathered() -> tuple[Tensor, Tensor]:
        states = layer.heads.index_select(0, slots).view(rows, length, 2 * shape.kv_heads, shape.head_size)
        keys, values = states.transpose(1, 2).chunk(2, dim=1)
        return keys, values

    ready = [part.contiguous() for part in gathered()]
    queries = q.unsqueeze(2)

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

    yield from sdpa(context, sizes, f"{what}, keys and values contiguous", lambda: attend(*ready), ours)
    yield from sdpa(context, sizes, f"{what}, gathered first", lambda: attend(*gathered()), ours)


def sdpa(context: Context, sizes: PeerSizes, what: str, call: Callable[[], Tensor], ours: float) -> Iterable[Measured]:
    """A line says so where a backend refuses the shape or is missing. That is not a failure."""
    for name in sizes.backends:
        try:
            with sdpa_kernel(BACKENDS[name]):
                seconds = seconds_per_call([call], context.device)
        except RuntimeError as error:
            yield Measured({"what": f"{what}: {name}", "µs": f"not run: {str(error).splitlines()[0]}"})
            continue
        yield Measured({"what": f"{what}: {name}", "µs": f"{1e6 * seconds:.1f}", "times ours": f"{seconds / ours:.2f}"})


def step(context: Context, sizes: PeerSizes, rows: int) -> Iterable[Measured]:
    ours = our_step(context, sizes, rows)
    yield Measured({"what": f"ours, {sizes.shape.layers} layers", "ms": f"{1e3 * ours:.3f}", "times ours": "1.00"})
    to_compile, seconds = loop_seconds(context, sizes, rows)
    said = {"what": "compiled loop, static cache", "ms": f"{1e3 * seconds:.3f}", "times ours": f"{seconds / ours:.2f}"}
    yield Measured(said | {"s to compile": f"{to_compile:.0f}"})


@torch.inference_mode(False)
@torch.no_grad()
def loop_seconds(context: Context, sizes: PeerSizes, rows: int) -> tuple[float, float]:
    """Seconds until the loop is compiled and recorded, and of a step. Without a GPU the loop runs as it is: compiling
    it would take a C++ compiler, and tens of seconds."""
    loop = StaticLoop(sizes.shape, rows, sizes.context + SPARE, sizes.dtype, context.device)
    forward = torch.compile(loop, mode="reduce-overhead", fullgraph=True) if context.on_gpu else loop
    ids = torch.ones(rows, dtype=torch.int64, device=context.device)
    position = torch.tensor([sizes.context], device=context.device)
    started_s = time.perf_counter()
    for _ in range(3):  # compiles, records, replays
        forward(ids, position)
    to_compile = time.perf_counter() - started_s
    if context.on_gpu:
        return to_compile, event_seconds(lambda: forward(ids, position), STEPS)
    return to_compile, seconds_per_call([lambda: forward(ids, position)], context.device)


def our_step(context: Context, sizes: PeerSizes, rows: int) -> float:
    """Device seconds of a decode step of the runner, sampling included, the median of SPARE // 2 steps."""
    slots = rows * (sizes.context + SPARE)
    load = RunnerLoad(sizes.shape, rows, sizes.context + SPARE, 128, slots)
    player = Player(make_runner(load, context.device), load)
    player.fill_cache()
    everyone = player.join_all(rows, sizes.context)
    outputs = [player.launch(everyone).wait() for _ in range(SPARE // 2)]
    return sorted(out.forward_ns + out.sampling_ns for out in outputs)[len(outputs) // 2] / 1e9


def transformers_step(context: Context, sizes: PeerSizes) -> Iterable[Measured]:
    """One row through transformers' generate with its static cache: the time of each further token."""
    seconds = generate_seconds(context, sizes, 64 if context.on_gpu else 4)
    yield Measured({"what": f"transformers, {sizes.shape.layers} layers", "ms": f"{1e3 * seconds:.3f}"})


@torch.inference_mode(False)
def generate_seconds(context: Context, sizes: PeerSizes, tokens: int) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, Any] = sizes.shape.config(str(sizes.dtype).removeprefix("torch."))
    with torch.device(context.device):
        model = LlamaForCausalLM(LlamaConfig(**fields)).to(sizes.dtype).eval()
    ids = torch.ones((1, sizes.context), dtype=torch.int64, device=context.device)
    options = {"cache_implementation": "static"} if context.on_gpu else {}
    times = []
    for new in (tokens, 1, tokens):  # the first run compiles
        started_s = time.perf_counter()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options)
        times.append(time.perf_counter() - started_s)
    return (times[2] - times[1]) / (tokens - 1)
