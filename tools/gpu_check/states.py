"""Random inputs of kernels: keys and values in scattered slots, and sampling parameters with every option."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from text_generation_server.kernels.interface import WORD_BITS, Allowed, Bans, Bias, Choices, Kernels, KvLayer, Masks
from text_generation_server.models.kv_cache import SCALED

SEED = 2**63 - 5


def backends() -> tuple[Kernels, Kernels]:
    """The two backends (Triton, reference)."""
    from text_generation_server.kernels import reference, triton

    return cast(Kernels, triton), cast(Kernels, reference)


def int32(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_layer(slots: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> KvLayer:
    shape = (slots + 1, 2 * kv_heads, size)
    if dtype not in SCALED:
        return KvLayer(torch.randn(shape, dtype=dtype, device=device))
    scales = torch.rand(shape[:2], device=device) / 50
    if dtype == torch.int8:
        return KvLayer(torch.randint(-127, 128, shape, dtype=dtype, device=device), scales)
    return KvLayer((torch.randn(shape, device=device) * 100).to(dtype), scales)


def random_table(rows: int, length: int, width: int, device: torch.device) -> Tensor:
    """int32 [rows, width]: each row's first `length` entries are slots 0 … rows · length - 1 in random order."""
    table = torch.zeros((rows, width), dtype=torch.int32, device=device)
    table[:, :length] = torch.randperm(rows * length, device=device).int().view(rows, length)
    return table


def neutral(rows: int, length: int, vocabulary: int, device: torch.device) -> Choices:
    """Choices with every option off: greedy rows with random histories."""
    history = torch.randint(0, vocabulary, (rows + 1, length + 8), dtype=torch.int32, device=device)

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    return Choices(
        rows_R=numbers.flip(0).contiguous(), history=history,
        lengths=torch.full((rows + 1,), length, dtype=torch.int32, device=device),
        prompt_lengths_R=column(length // 2, torch.int32), draws_R=column(False, torch.bool),
        seeds_R=SEED - numbers.long() * 7919, temperature_R=column(1, torch.float32), top_k_R=column(0, torch.int32),
        top_p_R=column(1, torch.float32), log_min_p_R=column(-math.inf, torch.float32),
        typical_p_R=column(1, torch.float32), repetition_penalty_R=column(1, torch.float32),
        frequency_penalty_R=column(0, torch.float32), presence_penalty_R=column(0, torch.float32),
        bias=None, allowed=None, bans=None,
        any_draws=False, any_penalties=False, any_cuts=False, any_typical=False,
    )  # fmt: skip


def random_bans(choices: Choices, tokens_RB: Tensor) -> Bans:
    """Bans of tokens[r, b] for each row r but the last. Half of them hold, because b ids before the token are the
    newest ids of the row's history."""
    rows, bans = tokens_RB.shape
    count, device = (rows - 1) * bans, tokens_RB.device
    lengths_R = choices.lengths[choices.rows_R.long()].tolist()
    before: list[int] = []
    for i, row in enumerate(choices.rows_R.tolist()[:-1]):
        history = choices.history[row, : lengths_R[i]].tolist()
        for b in range(bans):
            newest = history[len(history) - b :]
            before += newest if b % 2 else reversed(newest)
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    sizes = (numbers % bans).cumsum(0, dtype=torch.int32)
    offsets = torch.cat([sizes.new_zeros(1), sizes])
    until = torch.full_like(numbers, 2**31 - 1)
    return Bans(numbers // bans, tokens_RB[:-1].reshape(-1).contiguous(), until, offsets, int32(before, device))


def random_masks(rows: int, vocabulary: int, device: torch.device) -> Masks:
    """Masks for each row but the last. Rows in turns can choose half of all tokens, and a sixteenth."""
    shape = (rows - 1, -(-vocabulary // WORD_BITS))
    few, half = (torch.randint(-(2**31), 2**31, shape, device=device) for _ in range(2))
    for _ in range(3):
        few &= torch.randint(-(2**31), 2**31, shape, device=device)
    numbers = torch.arange(rows - 1, dtype=torch.int32, device=device)
    return Masks(numbers, torch.where(numbers.unsqueeze(1) % 2 == 0, half, few).int())


def variants(choices: Choices, vocabulary: int) -> Iterator[tuple[str, Choices]]:
    """Sampling parameters to run: options alone, then all together. The last row has neutral parameters, except that
    it draws its token, and has a bias if the other rows have one."""

    def with_values(base: Choices, **values: float) -> Choices:
        columns: dict[str, Any] = {}
        for name, value in values.items():
            columns[f"{name}_R"] = getattr(base, f"{name}_R").clone()
            columns[f"{name}_R"][:-1] = value
        return replace(base, **columns)

    rows, device = len(choices.rows_R), choices.rows_R.device
    drawing = replace(choices, draws_R=torch.ones_like(choices.draws_R), any_draws=True)
    tokens = torch.randperm(vocabulary, device=device)[:16].int().repeat(rows, 1)
    bias = Bias(tokens, torch.randn(rows, 16, device=device) * 4)
    allowed = Allowed(torch.arange(rows - 1, dtype=torch.int32, device=device), tokens[:-1].contiguous())
    bans = random_bans(choices, tokens)
    cutting = replace(drawing, any_cuts=True)
    yield "greedy", choices
    yield "draws", drawing
    yield "top-k", with_values(cutting, top_k=40)
    yield "top-p", with_values(cutting, top_p=0.9)
    yield "typical-p", with_values(replace(cutting, any_typical=True), typical_p=0.8)
    yield "masks", replace(drawing, allowed=allowed, bans=bans)
    masks = random_masks(rows, vocabulary, device)
    yield "masks of bits", replace(drawing, masks=masks)
    yield "repetition penalty", with_values(replace(drawing, any_penalties=True), repetition_penalty=1.3)
    everything = replace(
        drawing, bias=bias, bans=bans, masks=masks, any_penalties=True, any_cuts=True, any_typical=True
    )
    yield "all together", with_values(
        everything, temperature=0.8, top_k=300, top_p=0.95, log_min_p=math.log(0.001), typical_p=0.95,
        repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1,
    )  # fmt: skip
