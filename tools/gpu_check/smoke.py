"""Every kernel once at the server's shapes, in bfloat16, against the reference on the same device.

The whole table of tests is plan c. This stage says in seconds whether the kernels run at all where the server needs
them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_check.comparing import close, equal, within, worst
from gpu_check.findings import Case, Context, Measured
from gpu_check.model import REHEARSED
from gpu_check.states import backends, int32, neutral, random_layer, random_table, variants
from text_generation_benchmark.shapes import LLAMA_8B, LlamaShape
from text_generation_common.models.architecture import Activation
from text_generation_server.kernels.interface import AttentionOptions, ExpertWeights, KvLayer, Segments
from text_generation_server.layers.linear import make_linear
from text_generation_server.layers.weights import dense

TABLE = "Smoke: kernels at the server's shapes, against the reference"
LOGPROB = 1e-3  # largest accepted difference of log-probabilities
FP8 = torch.float8_e4m3fn
LEAST_SPLIT = 32_000  # size of a vocabulary that two ranks split


@dataclass(frozen=True, slots=True)
class SmokeSizes:
    shape: LlamaShape
    rows: int
    length: int  # tokens of each row
    width: int  # positions of a row of the table
    prompt: int
    window: int
    experts: int
    dtype: torch.dtype
    caches: tuple[torch.dtype, ...]


ON_GPU = SmokeSizes(
    shape=LLAMA_8B,
    rows=64,
    length=1000,
    width=4608,
    prompt=4096,
    window=512,
    experts=8,
    dtype=torch.bfloat16,
    caches=(torch.bfloat16, FP8, torch.int8),
)
# Triton's interpreter computes bfloat16 wrongly, and loses carries when it rounds to fp8.
REHEARSAL = SmokeSizes(
    shape=REHEARSED,
    rows=2,
    length=70,
    width=80,
    prompt=40,
    window=24,
    experts=3,
    dtype=torch.float16,
    caches=(torch.float16, torch.int8),
)


def compare_all(context: Context) -> Iterator[Case]:
    smoke = Smoke(ON_GPU if context.on_gpu else REHEARSAL, context.device)
    yield _case({"kernel": "embed"}, smoke.embed)
    for kernel in ("rms_norm", "add_rms_norm", "rms_norm_part"):
        yield _case({"kernel": kernel}, smoke.norm, kernel)
    yield _case({"kernel": "silu_mul"}, smoke.silu)
    for activation in Activation:
        yield _case({"kernel": f"activate: {activation.name}"}, smoke.activate, activation)
    yield _case({"kernel": "linear: head, float32"}, smoke.head)
    yield _case({"kernel": "place and advance"}, smoke.bookkeeping)
    for cache in smoke.sizes.caches:
        said = str(cache).removeprefix("torch.")
        yield _case({"kernel": "rope_and_store_kv", "cache": said}, smoke.rope, cache)
        yield _case({"kernel": "attend: decode", "cache": said}, smoke.decode, cache)
        yield _case({"kernel": "attend: prefill", "cache": said}, smoke.prefill, cache)
    for options in ("window", "soft cap and window", "slopes", "sinks"):
        for of, check in (("decode", smoke.decode), ("prefill", smoke.prefill)):
            yield _case({"kernel": f"attend: {of}, {options}"}, check, smoke.sizes.dtype, options)
    for kernel in ("layer_norm", "add_layer_norm"):
        yield _case({"kernel": kernel}, smoke.layer_norm, kernel)
    yield _case({"kernel": "route and experts"}, smoke.experts)
    yield _case({"kernel": "add_scored"}, smoke.scored)
    for option in ("greedy", "masks", "masks of bits", "all together"):
        yield _case({"kernel": f"sample: {option}"}, smoke.sample, option)
    yield _case({"kernel": "reduce_part and merge_parts"}, smoke.parts)


def _case(cells: Mapping[str, str], check: Callable[..., Measured], *arguments: object) -> Case:
    return Case(TABLE, cells, lambda: [check(*arguments)])


class Smoke:
    def __init__(self, sizes: SmokeSizes, device: torch.device) -> None:
        self.sizes = sizes
        self._device = device
        self._triton, self._reference = backends()

    def _numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).to(self.sizes.dtype)

    def embed(self) -> Measured:
        weight = self._numbers(self.sizes.shape.vocabulary, self.sizes.shape.hidden)
        ids = torch.randint(0, len(weight), (self.sizes.rows,), dtype=torch.int32, device=self._device)
        return equal(self._triton.embed(ids, weight), self._reference.embed(ids, weight))

    def norm(self, kernel: str) -> Measured:
        x, residual = (self._numbers(self.sizes.rows, self.sizes.shape.hidden) for _ in range(2))
        weight = self._numbers(self.sizes.shape.hidden)
        if kernel == "rms_norm":
            return close(
                self._triton.rms_norm(x, weight, 1e-5), self._reference.rms_norm(x, weight, 1e-5), self.sizes.dtype
            )
        if kernel == "rms_norm_part":
            half = range(x.shape[1] // 2, x.shape[1])
            expected = x.clone()
            for kernels, values in ((self._triton, x), (self._reference, expected)):
                kernels.rms_norm_part(values, half, weight[: len(half)].contiguous(), 1e-5)
            return close(x, expected, self.sizes.dtype)
        ours = self._triton.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
        theirs = self._reference.add_rms_norm(x, residual, weight, 1e-5)
        return worst(close(ours[0], theirs[0], self.sizes.dtype), equal(ours[1], theirs[1]))

    def layer_norm(self, kernel: str) -> Measured:
        x, residual = (self._numbers(self.sizes.rows, self.sizes.shape.hidden) for _ in range(2))
        weight, bias = (self._numbers(self.sizes.shape.hidden) for _ in range(2))
        if kernel == "layer_norm":
            expected = self._reference.layer_norm(x, weight, bias, 1e-5)
            return close(self._triton.layer_norm(x, weight, bias, 1e-5), expected, self.sizes.dtype)
        ours = self._triton.add_layer_norm(x.clone(), residual.clone(), weight, bias, 1e-5)
        theirs = self._reference.add_layer_norm(x, residual, weight, bias, 1e-5)
        return worst(close(ours[0], theirs[0], self.sizes.dtype), equal(ours[1], theirs[1]))

    def experts(self) -> Measured:
        """An eighth of the model's MLP for each expert, and two experts for each token."""
        rows, count = self.sizes.rows, self.sizes.experts
        width, inner = self.sizes.shape.hidden, self.sizes.shape.intermediate // 8
        x = self._numbers(rows, width)
        gate_up = self._numbers(count, 2 * inner, width) / width**0.5
        down = self._numbers(count, width, inner) / inner**0.5
        # No two logits of a token are equal, so that its choice is certain.
        logits = torch.rand(rows, count, device=self._device).argsort(dim=1).to(self.sizes.dtype) / 2
        ours, theirs = (kernels.route(logits, 2, True) for kernels in (self._triton, self._reference))
        routed = worst(equal(ours.pairs_P, theirs.pairs_P), equal(ours.offsets, theirs.offsets))
        expected = self._reference.experts(x.float(), theirs, ExpertWeights(gate_up.float(), down.float()))
        out = self._triton.experts(x, ours, ExpertWeights(gate_up, down))
        return worst(close(out, expected, self.sizes.dtype), routed)

    def silu(self) -> Measured:
        x = self._numbers(self.sizes.rows, 2 * self.sizes.shape.intermediate)
        return close(self._triton.silu_mul(x), self._reference.silu_mul(x.float()), self.sizes.dtype)

    def activate(self, activation: Activation) -> Measured:
        x = self._numbers(self.sizes.rows, 2 * self.sizes.shape.intermediate)
        return worst(*(
            close(
                self._triton.activate(x, activation, gated),
                self._reference.activate(x.float(), activation, gated),
                self.sizes.dtype,
            )
            for gated in (False, True)
        ))  # fmt: skip

    def head(self) -> Measured:
        """The product that gives logits, in float32 although its inputs are not. A tenth of the vocabulary."""
        shape = self.sizes.shape
        weight = self._numbers(max(1, shape.vocabulary // 10), shape.hidden) / shape.hidden**0.5
        x = self._numbers(self.sizes.rows, shape.hidden)
        logits = make_linear(self._triton, dense(weight), dtype=torch.float32)(x)
        if logits.dtype != torch.float32:
            return Measured(failure=f"logits are {logits.dtype}")
        # On the CPU, torch rounds the product to the inputs' type.
        dtype = torch.float32 if self._device.type == "cuda" else self.sizes.dtype
        return close(logits, x.double() @ weight.double().t(), dtype)

    def scored(self) -> Measured:
        x, y, inputs = (self._numbers(self.sizes.rows, self.sizes.shape.hidden) for _ in range(3))
        weight = self._numbers(self.sizes.shape.hidden) / self.sizes.shape.hidden**0.5
        expected = self._reference.add_scored(x.float(), y.float(), inputs.float(), weight.float())
        return close(self._triton.add_scored(x, y, inputs, weight), expected, self.sizes.dtype)

    def parts(self) -> Measured:
        """What two ranks with a half of the vocabulary each choose together, to the bit."""
        rows, vocabulary = self.sizes.rows, max(self.sizes.shape.vocabulary, LEAST_SPLIT)
        options = dict(variants(neutral(rows, self.sizes.length, vocabulary, self._device), vocabulary))
        part = self._triton.vocabulary_part(vocabulary, 2)
        assert self._triton.splits_draws(part)
        logits = torch.randn(rows, 2 * part, device=self._device) * 3
        own = [
            self._triton.reduce_part(
                logits[:, first : first + part].contiguous(),
                options["draws"],
                range(min(first, vocabulary), min(first + part, vocabulary)),
            )
            for first in (0, part)
        ]
        merged = self._triton.merge_parts(own, vocabulary)
        whole = self._triton.sample(logits[:, :vocabulary].contiguous(), options["draws"])
        allowed = torch.full_like(whole.logprobs_R, LOGPROB)
        return worst(equal(merged.ids_R, whole.ids_R), within(merged.logprobs_R, whole.logprobs_R, allowed))

    def bookkeeping(self) -> Measured:
        rows, width = self.sizes.rows, self.sizes.width
        history, table = torch.randint(0, 10**6, (2, rows + 1, width), dtype=torch.int32, device=self._device)
        lengths = torch.randint(1, width, (rows + 1,), dtype=torch.int32, device=self._device)
        index = torch.randperm(rows, device=self._device).int()
        slots, ids = torch.randint(0, 2**31 - 1, (2, rows), dtype=torch.int32, device=self._device)
        results = []
        for kernels in (self._triton, self._reference):
            own_history, own_table, own_lengths = history.clone(), table.clone(), lengths.clone()
            placed = kernels.place(index, slots, own_history, own_table, own_lengths)
            kernels.advance(own_history, own_lengths, index, ids)
            results.append((*placed, own_history, own_table, own_lengths))
        return worst(*(equal(ours, theirs) for ours, theirs in zip(*results, strict=True)))

    def rope(self, cache: torch.dtype) -> Measured:
        """What lies in the slots is compared as numbers: 8 bits times their scale, to two steps of rounding."""
        shape, tokens = self.sizes.shape, self.sizes.rows
        qkv = self._numbers(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_size)
        positions = torch.randint(0, self.sizes.length, (tokens,), dtype=torch.int32, device=self._device)
        slots = torch.randperm(tokens + 5, device=self._device)[:tokens].int()
        angles = torch.rand(self.sizes.length, shape.head_size // 2, device=self._device) * 6
        empty = random_layer(tokens + 5, shape.kv_heads, shape.head_size, cache, self._device)
        results = []
        for kernels, layer in ((self._triton, copied(empty)), (self._reference, copied(empty))):
            # torch cannot scatter fp8 on every device, so the reference keeps the numbers of the model's type.
            own = layer if kernels is self._triton or cache != FP8 else KvLayer(layer.heads.to(self.sizes.dtype))
            heads, rotary = (shape.heads, shape.kv_heads), (angles.cos(), angles.sin())
            q = kernels.rope_and_store_kv(qkv.clone(), heads, rotary, positions_T=positions, kv=own, slots_T=slots)
            results.append((q, numbers_of(own)[slots.long()]))
        (q, stored), (expected_q, expected) = results
        compared = close(q, expected_q, self.sizes.dtype)
        if cache == self.sizes.dtype:
            return worst(compared, close(stored, expected, cache))
        # A head's largest number is about 5: a step of int8 is 5 / 127, half a step of fp8 a sixteenth of a number.
        return worst(compared, within(stored, expected, 0.07 * expected.abs() + 0.05))

    def _options(self, names: str) -> AttentionOptions:
        heads, size = self.sizes.shape.heads, self.sizes.shape.head_size
        slopes = torch.linspace(0.5, 0.004, heads, device=self._device)
        sinks = torch.linspace(-2, 5, heads, device=self._device)
        return AttentionOptions(
            size**-0.5,
            30.0 if "soft cap" in names else None,
            slopes if "slopes" in names else None,
            sinks if "sinks" in names else None,
            self.sizes.window if "window" in names else None,
        )

    def decode(self, cache: torch.dtype, options: str = "") -> Measured:
        shape, rows = self.sizes.shape, self.sizes.rows
        table = random_table(rows, self.sizes.length, self.sizes.width, self._device)
        kv = random_layer(rows * self.sizes.length, shape.kv_heads, shape.head_size, cache, self._device)
        index = torch.arange(rows, dtype=torch.int32, device=self._device).flip(0).contiguous()
        lengths = self.sizes.length - torch.arange(rows, dtype=torch.int32, device=self._device) % 7
        return self._attend(rows, kv, table, rows_R=index, lengths_R=lengths, segments=None, options=options)

    def prefill(self, cache: torch.dtype, options: str = "") -> Measured:
        """A prompt, and a chunk behind a cached prefix."""
        shape, prompt = self.sizes.shape, self.sizes.prompt
        prefix = prompt // 2 + 3
        table = random_table(2, prompt, prompt + 8, self._device)
        kv = random_layer(2 * prompt, shape.kv_heads, shape.head_size, cache, self._device)
        tokens = 2 * prompt - prefix
        starts, offsets = int32([0, prefix], self._device), int32([0, prompt, tokens], self._device)
        segments = Segments(int32([0, 1], self._device), starts, offsets, tokens)
        none = int32([], self._device)
        return self._attend(tokens, kv, table, rows_R=none, lengths_R=none, segments=segments, options=options)

    def _attend(
        self, tokens: int, kv: KvLayer, table: Tensor, rows_R: Tensor, lengths_R: Tensor, segments: Segments | None,
        options: str,
    ) -> Measured:  # fmt: skip
        shape = self.sizes.shape
        q = self._numbers(tokens, shape.heads, shape.head_size)
        arguments = (table, rows_R, lengths_R, segments, self._options(options))
        ours = self._triton.attend(q, kv, *arguments)
        return close(ours, self._reference.attend(q.float(), widened(kv), *arguments), self.sizes.dtype)

    def sample(self, option: str) -> Measured:
        vocabulary = self.sizes.shape.vocabulary
        options = dict(variants(neutral(self.sizes.rows, self.sizes.length, vocabulary, self._device), vocabulary))
        logits = torch.randn(self.sizes.rows, vocabulary, device=self._device) * 3
        expected = self._reference.sample(logits.clone(), options[option])
        chosen = self._triton.sample(logits, options[option])
        same = chosen.ids_R == expected.ids_R
        # Two tokens whose scores differ by rounding only may change places: rare, so one row of 64 may.
        if int((~same).sum()) > self.sizes.rows // 64:
            return Measured(failure=f"{int((~same).sum())} of {len(same)} rows chose another token")
        allowed = torch.full_like(chosen.logprobs_R[same], LOGPROB)
        return within(chosen.logprobs_R[same], expected.logprobs_R[same], allowed)


def copied(kv: KvLayer) -> KvLayer:
    return KvLayer(kv.heads.clone(), None if kv.scales is None else kv.scales.clone())


def numbers_of(kv: KvLayer) -> Tensor:
    heads = kv.heads.float()
    return heads if kv.scales is None else heads * kv.scales.unsqueeze(2)


def widened(kv: KvLayer) -> KvLayer:
    """The same keys and values in a type that the reference can use: fp8 becomes float32, because torch cannot gather
    fp8 on every device.
    """
    return KvLayer(kv.heads.float(), kv.scales) if kv.heads.dtype == FP8 else kv
