"""The reference of all kernels, in torch operations on dense tensors. Every other backend must give equal results, on
any device.

In float32 on a CPU, attention has another property, on which the serving tests rely: a row's result has the same bits
whatever the other rows of the batch are, on every processor. For that, keys are summed in tiles of 64 from position 0,
tiles are added up one after the other, and products and sums are computed number by number, in order. No BLAS promises
a fixed order.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_common.models.architecture import Activation, ClampedGate
from text_generation_common.quantized.values import Weight
from text_generation_server.kernels.interface import (
    HALVING,
    LOG2E,
    MAX_HALVINGS,
    WORD_BITS,
    AdaptedPairs,
    AdapterMatrices,
    Allowed,
    AttentionOptions,
    Bans,
    Bias,
    Choices,
    Chosen,
    ExpertCodes,
    ExpertWeights,
    HeadNorms,
    KvLayer,
    LinearKernel,
    Masks,
    Routes,
    Segments,
)
from text_generation_server.kernels.products import torch_linear, weight_of_expert

TILE = 64
MIN_QUERIES = 16
# Most scores (4 bytes each) in memory at once, in a block of a prefill. Bounds the memory that long prompts need.
MAX_SCORES = 1 << 23
# Most elements of keys and values in memory at once, in a block of a decode step.
MAX_GATHERED = 1 << 23
LARGEST_INT8 = 127
SMALLEST_SCALE = 1e-6
MINUS_INFINITY = float("-inf")
LARGEST_FLOAT = torch.finfo(torch.float32).max


def embed(ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    return F.embedding(ids_T, weight_VH)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    x = x_TH.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if weight_H.dtype != x_TH.dtype:
        return (x * weight_H).to(x_TH.dtype)
    return weight_H * x.to(x_TH.dtype)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x_TH + residual_TH
    return rms_norm(total, weight_H, eps), total


def rms_norm_part(x_TN: Tensor, part: range, weight: Tensor, eps: float) -> None:
    columns = x_TN[:, part.start : part.stop]
    columns.copy_(rms_norm(columns, weight, eps))


def layer_norm(x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
    bias = None if bias_H is None else bias_H.float()
    return F.layer_norm(x_TH.float(), weight_H.shape, weight_H.float(), bias, eps).to(x_TH.dtype)


def add_layer_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = x_TH + residual_TH
    return layer_norm(total, weight_H, bias_H, eps), total


def rope_and_store_kv(
    qkv: Tensor,
    heads: tuple[int, int],
    rotary: tuple[Tensor, Tensor],
    positions_T: Tensor,
    kv: KvLayer,
    slots_T: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    query_heads, kv_heads = heads
    qkv = qkv.view(qkv.shape[0], query_heads + 2 * kv_heads, -1)
    rotating = query_heads + kv_heads
    if norms is not None:
        queries, keys, values = torch.split(qkv, [query_heads, kv_heads, kv_heads], dim=1)
        queries, keys = rms_norm(queries, norms.query_D, norms.eps), rms_norm(keys, norms.key_D, norms.eps)
        qkv = torch.cat([queries, keys, values], dim=1)
    cos, sin = (table[positions_T].unsqueeze(1) for table in rotary)
    first, second = qkv[:, :rotating].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)
    store(torch.cat([rotated[:, query_heads:], qkv[:, rotating:]], dim=1), kv, slots_T)
    return rotated[:, :query_heads]


def store(states_TGD: Tensor, kv: KvLayer, slots_T: Tensor) -> None:
    """Writes keys and values [T, 2G, D] into their slots, in the cache's type."""
    if kv.scales is None:
        kv.heads[slots_T] = states_TGD.to(kv.heads.dtype)
        return
    largest = torch.finfo(kv.heads.dtype).max if kv.heads.dtype.is_floating_point else LARGEST_INT8
    states = states_TGD.float()
    scales_TG = (states.abs().amax(dim=-1) / largest).clamp(min=SMALLEST_SCALE)
    numbers = (states / scales_TG.unsqueeze(-1)).clamp(-largest, largest)
    if not kv.heads.dtype.is_floating_point:
        numbers = numbers.round()
    kv.heads[slots_T] = numbers.to(kv.heads.dtype)
    kv.scales[slots_T] = scales_TG


def attend(
    q_THD: Tensor,
    kv: KvLayer,
    table: Tensor,
    rows_R: Tensor,
    lengths_R: Tensor,
    segments: Segments | None,
    options: AttentionOptions,
) -> Tensor:
    out = torch.zeros_like(q_THD)
    count = int((lengths_R > 0).sum())
    if count:
        length = int(lengths_R.max())
        longest = _end_of_tile(length - options.first_seen(length - 1)) + TILE
        block = max(1, MAX_GATHERED // (longest * kv.heads[0].numel()))
        parts = zip(*(torch.split(t[:count], block) for t in (q_THD, rows_R, lengths_R)), strict=True)
        out[:count] = torch.cat(
            [
                _attend_decode(q, kv, table, rows_R=rows, lengths_R=lengths, options=options)
                for q, rows, lengths in parts
            ]
        )
    for first, row, start, end in segments.runs() if segments is not None else ():
        last = first + end - start
        out[first:last] = _attend_run(q_THD[first:last], kv, table, row=row, start=start, options=options)
    return out


def _attend_decode(
    q_RHD: Tensor, kv: KvLayer, table: Tensor, rows_R: Tensor, lengths_R: Tensor, options: AttentionOptions
) -> Tensor:
    rows, heads, size = q_RHD.shape
    first_R = torch.zeros_like(lengths_R) if options.window is None else (lengths_R - options.window).clamp(min=0)
    begin_R = first_R // TILE * TILE
    length = _end_of_tile(int((lengths_R - begin_R).max()))
    positions_RL = begin_R.unsqueeze(1) + torch.arange(length, device=q_RHD.device)
    seen_RL = (positions_RL >= first_R.unsqueeze(1)) & (positions_RL < lengths_R.unsqueeze(1))
    slots_RL = table[rows_R.unsqueeze(1), positions_RL.clamp(max=table.shape[1] - 1)]
    keys, values = _gather(kv, slots_RL, seen_RL, q_RHD.dtype)
    group = heads // kv.kv_heads
    q = q_RHD.view(rows, kv.kv_heads, group, size)
    q = F.pad(q, (0, 0, 0, max(0, MIN_QUERIES - group)))
    distances_RL = positions_RL - (lengths_R - 1).unsqueeze(1)
    out = _attend(
        q,
        keys,
        values,
        visible=seen_RL.view(rows, 1, 1, -1),
        distances=distances_RL.view(rows, 1, 1, -1),
        options=options,
    )
    return out[:, :, :group].reshape(rows, heads, size)


def _attend_run(q_THD: Tensor, kv: KvLayer, table: Tensor, row: int, start: int, options: AttentionOptions) -> Tensor:
    """Attention of the queries at positions start … start + T - 1 of one row."""
    tokens, heads, size = q_THD.shape
    kv_heads = kv.kv_heads
    group = heads // kv_heads
    end = start + tokens
    begin = options.first_seen(start) // TILE * TILE
    positions = torch.arange(begin, _end_of_tile(end), device=q_THD.device)
    seen = (positions >= options.first_seen(start)) & (positions < end)
    slots = table[row, positions.clamp(max=table.shape[1] - 1)]
    keys, values = _gather(kv, slots.unsqueeze(0), seen.unsqueeze(0), q_THD.dtype)
    q = q_THD.view(tokens, kv_heads, group, size).transpose(0, 1)  # [G, T, group, D]
    block = max(MIN_QUERIES, MAX_SCORES // (heads * len(positions)))
    blocks = []
    for first in range(0, tokens, block):
        part = q[:, first : first + block]
        count = part.shape[1]
        # No query of the block attends to keys before or after these tiles.
        tiles = slice(
            options.first_seen(start + first) // TILE * TILE - begin, _end_of_tile(start + first + count) - begin
        )
        distances = positions[tiles] - torch.arange(count, device=q.device).add(start + first).unsqueeze(1)
        queries = part.reshape(1, kv_heads, count * group, size)
        padding = max(0, MIN_QUERIES - count * group)
        queries = F.pad(queries, (0, 0, 0, padding))
        distances = F.pad(distances.repeat_interleave(group, dim=0), (0, 0, 0, padding))
        visible = distances <= 0
        if options.window is not None:
            visible &= distances > -options.window
        out = _attend(
            queries, keys[:, :, tiles], values[:, :, tiles], visible=visible, distances=distances, options=options
        )
        blocks.append(out[0, :, : count * group].reshape(kv_heads, count, group, size))
    return torch.cat(blocks, dim=1).transpose(0, 1).reshape(tokens, heads, size)


def _end_of_tile(length: int) -> int:
    return -(-length // TILE) * TILE


def _gather(kv: KvLayer, slots_RL: Tensor, seen_RL: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [R, G, L, D] of each row's slots, zeros at positions that no query sees."""
    heads = kv.heads
    nowhere = heads.shape[0] - 1
    # Other slots may hold anything, even NaN, and 0 * NaN is NaN. So these positions read the extra slot, which belongs
    # to no row.
    heads[nowhere] = 0
    slots = slots_RL.masked_fill(~seen_RL, nowhere).flatten()
    gathered = heads.index_select(0, slots)
    if kv.scales is not None:
        kv.scales[nowhere] = 0
        gathered = gathered.float() * kv.scales.index_select(0, slots).unsqueeze(-1)
    gathered = gathered.to(dtype).view(*slots_RL.shape, *heads.shape[1:]).transpose(1, 2)
    return gathered[:, : kv.kv_heads], gathered[:, kv.kv_heads :]


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, distances: Tensor, options: AttentionOptions
) -> Tensor:
    """q [R, G, M, D], keys and values [R, G, L, D] with L a multiple of TILE. visible and distances (position of the
    key - position of the query) broadcast to [R, G, M, L]. Query m is one of head m % group."""
    rows, kv_heads, queries, size = q.shape
    tiles = keys.shape[2] // TILE
    flat = rows * kv_heads
    q_flat = (q * options.scale).reshape(flat, queries, size).contiguous()
    k_tiles = keys.reshape(flat, tiles, TILE, size)
    v_tiles = values.reshape(flat, tiles, TILE, size)
    scores = torch.stack([_product(q_flat, k_tiles[:, t].transpose(1, 2)) for t in range(tiles)], dim=2).float()

    def in_tiles(t: Tensor) -> Tensor:
        return t.expand(rows, kv_heads, queries, tiles * TILE).reshape(flat, queries, tiles, TILE)

    def of_queries(heads_H: Tensor) -> Tensor:
        heads = heads_H.view(kv_heads, -1)
        return heads.repeat(rows, -(-queries // heads.shape[1]))[:, :queries].view(flat, queries, 1, 1)

    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.slopes_H is not None:
        scores = scores + of_queries(options.slopes_H) * in_tiles(distances)
    scores = scores.masked_fill(~in_tiles(visible), float("-inf"))
    peak = scores.amax(dim=(2, 3), keepdim=True)
    if options.sinks_H is not None:
        sinks = of_queries(options.sinks_H)
        peak = torch.maximum(peak, sinks)
    weights = torch.exp(scores - peak)
    sums = _sum(weights)
    weights = weights.to(q.dtype)
    total = sums[:, :, 0]
    if options.sinks_H is not None:
        total = total + torch.exp(sinks - peak).view(flat, queries)
    out = _product(weights[:, :, 0], v_tiles[:, 0])
    for t in range(1, tiles):
        total = total + sums[:, :, t]
        out = _product(weights[:, :, t], v_tiles[:, t], out)
    return (out / total.unsqueeze(2).to(out.dtype)).view(rows, kv_heads, queries, size)


def _product(a_BMK: Tensor, b_BKN: Tensor, start: Tensor | None = None) -> Tensor:
    """start + a b. In float32 on a CPU it is computed number by number, so that the bits do not depend on the shape."""
    if a_BMK.dtype != torch.float32 or a_BMK.device.type != "cpu":
        return torch.bmm(a_BMK, b_BKN) if start is None else torch.baddbmm(start, a_BMK, b_BKN)
    out = a_BMK[:, :, :1] * b_BKN[:, :1]
    for k in range(1, a_BMK.shape[2]):
        out += a_BMK[:, :, k : k + 1] * b_BKN[:, k : k + 1]
    return out if start is None else start + out


def _sum(tiles: Tensor) -> Tensor:
    """Sum over the last dimension, whose length must be a power of two: the second half is added to the first,
    repeatedly.
    """
    while (half := tiles.shape[-1] // 2) > 0:
        tiles = tiles[..., :half] + tiles[..., half:]
    return tiles.squeeze(-1)


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def route(logits_TE: Tensor, chosen: int, over_chosen: bool) -> Routes:
    # A stable sort in descending order puts the first of equal logits first.
    values, order = logits_TE.float().sort(dim=-1, descending=True, stable=True)
    shares = values[:, :chosen].softmax(-1) if over_chosen else values.softmax(-1)[:, :chosen]
    ids_P = order[:, :chosen].flatten()
    ends = torch.bincount(ids_P, minlength=logits_TE.shape[1]).cumsum(0)
    pairs_P = ids_P.argsort(stable=True).int()
    return Routes(shares.flatten().contiguous(), pairs_P, F.pad(ends, (1, 0)).int())


def experts(x_TH: Tensor, routes: Routes, weights: ExpertWeights, adapted: AdaptedPairs | None = None) -> Tensor:
    tokens, width = x_TH.shape
    parts = torch.empty((len(routes.pairs_P), width), dtype=x_TH.dtype, device=x_TH.device)
    chosen, ends = len(routes.pairs_P) // tokens, routes.offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(ends)):
        if start == end:
            continue
        pairs = routes.pairs_P[start:end].long()
        gate_up_weight, down_weight = (weight_of_expert(w, expert, x_TH.dtype) for w in (weights.gate_up, weights.down))
        # Row by row: no BLAS promises a row the same bits in products of different numbers of rows.
        for at, pair in enumerate(pairs.tolist(), start):
            x = x_TH[pair // chosen].unsqueeze(0)
            gate_up = F.linear(x, gate_up_weight, _of_expert(weights.gate_up_bias, expert))
            own = None if adapted is None else adapted.between(at, at + 1)
            gate_up = _plus(gate_up, None if own is None else own.of_gate_up(x))
            inner = silu_mul(gate_up) if weights.clamped is None else _clamped(gate_up, weights.clamped)
            out = F.linear(inner, down_weight, _of_expert(weights.down_bias, expert))
            out = _plus(out, None if own is None else own.of_down(inner))
            parts[pair] = out[0] * routes.scores_P[pair].to(x_TH.dtype)
    return parts.view(tokens, chosen, width).float().sum(1).to(x_TH.dtype)


def _plus(y: Tensor, addend: Tensor | None) -> Tensor:
    return y if addend is None else (y.float() + addend).to(y.dtype)


def _of_expert(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]


def _clamped(gate_up: Tensor, clamped: ClampedGate) -> Tensor:
    gate, up = gate_up.float().clamp(max=clamped.limit).chunk(2, dim=-1)
    up = up.clamp(min=-clamped.limit)
    return ((up + 1) * gate * torch.sigmoid(clamped.slope * gate)).to(gate_up.dtype)


def experts_of_codes(experts: Iterable[ExpertCodes], clamped: ClampedGate | None, x_type: torch.dtype) -> None:
    return None


def add_scored(x_TH: Tensor, y_TH: Tensor, inputs_TH: Tensor, weight_H: Tensor, addend: Tensor | None = None) -> Tensor:
    products = (inputs_TH.float() * weight_H.float()).sum(-1, keepdim=True)
    scores = torch.sigmoid(products if addend is None else products + addend[:, :1])
    return (x_TH.float() + scores * y_TH.float()).to(x_TH.dtype)


def activate(x: Tensor, activation: Activation, gated: bool) -> Tensor:
    if not gated:
        return _activated(x, activation)
    gate, up = x.chunk(2, dim=-1)
    return _activated(gate, activation) * up


def _activated(x: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.relu:
        return F.relu(x)
    if activation is Activation.silu:
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation is Activation.gelu_tanh else "none")


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear(
    weight: Weight, bias: Tensor | None, *, gated: bool, x_type: torch.dtype, y_type: torch.dtype, factor: float = 1.0
) -> LinearKernel:
    return torch_linear(weight, bias, gated=gated, x_type=x_type, y_type=y_type, factor=factor, silu_mul=silu_mul)


def pair_slots(slots_T: Tensor, routes: Routes) -> Tensor:
    experts, chosen = len(routes.offsets) - 1, len(routes.pairs_P) // len(slots_T)
    numbers = torch.arange(experts, device=slots_T.device)
    experts_P = torch.repeat_interleave(numbers, routes.offsets.diff(), output_size=len(routes.pairs_P))
    slots_P = slots_T[routes.pairs_P.long() // chosen]
    return torch.where(slots_P < 0, -1, slots_P * experts + experts_P).int()


def adapt(x: Tensor, slots_T: Tensor, matrices: AdapterMatrices, routes: Routes | None = None) -> Tensor:
    if routes is not None:
        x = x[routes.pairs_P.long() // (len(routes.pairs_P) // len(x))]
    out = torch.full((x.shape[0], matrices.up.shape[2]), -0.0, device=x.device)
    for t, slot in enumerate(slots_T.tolist()):
        if slot < 0:
            continue
        if matrices.bias is not None:
            out[t] = matrices.bias[slot]
        for part, (start, end) in enumerate(pairwise((0, *matrices.ends))):
            if rank := int(matrices.ranks[slot, part]):
                down = matrices.down[slot, part * matrices.rank :][:rank].float()
                hidden = (down * x[t].float()).sum(1)
                out[t, start:end] += (hidden.unsqueeze(1) * matrices.up[slot, :rank, start:end].float()).sum(0)
    return out


def adapt_embeddings(x_TH: Tensor, ids_T: Tensor, slots_T: Tensor, matrices: AdapterMatrices) -> Tensor:
    out = x_TH.float()
    for t, slot in enumerate(slots_T.tolist()):
        if slot >= 0:
            own = int(matrices.ranks[slot, 0])
            hidden = matrices.down[slot, ids_T[t], :own].float()
            out[t] += (hidden.unsqueeze(1) * matrices.up[slot, :own].float()).sum(0)
    return out.to(x_TH.dtype)


def sample(logits_RV: Tensor, choices: Choices) -> Chosen:
    # A NaN fails both comparisons. Rows that are not finite are computed with the other rows, as rows of zeros, because
    # no operation mixes rows.
    finite_R = (logits_RV.amin(dim=1) > MINUS_INFINITY) & (logits_RV.amax(dim=1) < -MINUS_INFINITY)
    logits_RV.masked_fill_(~finite_R.unsqueeze(1), 0)
    empty_R = torch.zeros_like(finite_R)
    if choices.any_changes:
        change(logits_RV, choices)
        if choices.masks is not None:
            _mask(logits_RV, choices.masks)
        empty_R = finite_R & (logits_RV.amax(dim=1) == MINUS_INFINITY)
        finite_R &= ~empty_R
        logits_RV.masked_fill_(~finite_R.unsqueeze(1), 0)
    _divide_and_cut(logits_RV, choices)
    logits_RV.masked_fill_(~finite_R.unsqueeze(1), 0)
    scores_RV = logits_RV
    if choices.any_draws:
        positions_R = choices.lengths[choices.rows_R]
        noise_RV = gumbel_noise(choices.seeds_R, positions_R, logits_RV.shape[1])
        scores_RV = torch.where(choices.draws_R.unsqueeze(1), logits_RV + noise_RV, logits_RV)
    ids_R = scores_RV.argmax(dim=1).masked_fill_(~finite_R, 0)
    logprobs_R = logits_RV.log_softmax(dim=1).gather(1, ids_R.unsqueeze(1)).squeeze(1)
    logprobs_R.masked_fill_(~finite_R, 0).masked_fill_(empty_R, MINUS_INFINITY)
    return Chosen(ids_R.int(), logprobs_R, finite_R)


def vocabulary_part(vocab_size: int, ranks: int) -> int:
    return -(-vocab_size // ranks)


def splits_draws(part: int) -> bool:
    """torch's sum over a whole row has another order than the merge of parts."""
    return False


def reduce_part(logits_RV: Tensor, choices: Choices, ids: range) -> Tensor:
    """int32 [6, R, 1]: best score, its logit, peak, Σ exp(logit - peak), which are float32; best id, whether finite."""
    logits_RV = logits_RV[:, : len(ids)]
    finite_R = logits_RV.isfinite().all(dim=1)
    # An id without likelihood stands for an empty part.
    logits_RV = F.pad(logits_RV.nan_to_num() / choices.temperature_R.unsqueeze(1), (0, 1), value=MINUS_INFINITY)
    noise_RV = gumbel_noise(choices.seeds_R, choices.lengths[choices.rows_R], ids.stop + 1)[:, ids.start :]
    scores_RV = torch.where(choices.draws_R.unsqueeze(1), logits_RV + noise_RV, logits_RV)
    best_R = scores_RV.argmax(dim=1, keepdim=True)
    peak_R = logits_RV.amax(dim=1)
    total_R = (logits_RV - peak_R.clamp(min=-LARGEST_FLOAT).unsqueeze(1)).exp().sum(dim=1)
    floats = [scores_RV.gather(1, best_R).squeeze(1), logits_RV.gather(1, best_R).squeeze(1), peak_R, total_R]
    words = [*(x.view(torch.int32) for x in floats), best_R.squeeze(1).int() + ids.start, finite_R.int()]
    return torch.stack(words).unsqueeze(2)


def merge_parts(parts: list[Tensor], vocab_size: int) -> Chosen:
    words = torch.cat(parts, dim=2)
    scores_RB, logits_RB, peaks_RB, totals_RB = words[:4].view(torch.float32)
    best_R = scores_RB.argmax(dim=1, keepdim=True)
    peak_R = peaks_RB.amax(dim=1)
    total_R = (totals_RB * (peaks_RB - peak_R.unsqueeze(1)).exp()).sum(dim=1)
    finite_R = words[5].bool().all(dim=1)
    logprobs_R = logits_RB.gather(1, best_R).squeeze(1) - peak_R - total_R.log()
    ids_R = words[4].gather(1, best_R).squeeze(1)
    return Chosen(ids_R.masked_fill(~finite_R, 0), logprobs_R.masked_fill(~finite_R, 0), finite_R)


def sorts() -> bool:
    return True


def change(logits_RV: Tensor, choices: Choices) -> None:
    """Adds biases to the model's logits, and applies penalties, allowed tokens and bans, in place."""
    if choices.bias is not None:
        _add_bias(logits_RV, choices.bias)
    if choices.any_penalties:
        _penalize(logits_RV, choices)
    if choices.allowed is not None:
        _allow(logits_RV, choices.allowed)
    if choices.bans is not None:
        _ban(logits_RV, choices, choices.bans)


def _divide_and_cut(logits_RV: Tensor, choices: Choices) -> None:
    """Turns logits, in place, into the logits of the distribution from which tokens are drawn."""
    if choices.any_draws:
        logits_RV.div_(choices.temperature_R.unsqueeze(1))
    if choices.any_cuts:
        _cut_tails(logits_RV, choices)
    if choices.any_typical:
        _cut_untypical(logits_RV, choices.typical_p_R.unsqueeze(1))


def _add_bias(logits_RV: Tensor, bias: Bias) -> None:
    # Entries without a token add minus zero, which changes no number, not even a zero of either sign.
    values_RB = bias.values_RB.masked_fill(bias.tokens_RB < 0, -0.0)
    logits_RV.scatter_add_(1, bias.tokens_RB.clamp(min=0).long(), values_RB)


def _penalize(logits_RV: Tensor, choices: Choices) -> None:
    """Repetition penalty: tokens of prompt and output become less likely, once each. Frequency penalty: output tokens
    become less likely with each use. Presence penalty: output tokens become less likely, once each.
    """
    penalties = (choices.repetition_penalty_R, choices.frequency_penalty_R, choices.presence_penalty_R)
    rows_P = ((penalties[0] != 1) | (penalties[1] != 0) | (penalties[2] != 0)).nonzero().squeeze(1)
    repetition, frequency, presence = (penalty_R[rows_P].unsqueeze(1) for penalty_R in penalties)
    own, logits_PV = choices.rows_R[rows_P], logits_RV[rows_P]
    lengths, history = choices.lengths[own].unsqueeze(1), choices.history[own].long()
    positions = torch.arange(history.shape[1], device=logits_RV.device)
    history = torch.where(positions < lengths, history, history[:, :1])  # positions past the end repeat the first token
    seen = torch.zeros_like(logits_PV, dtype=torch.bool).scatter_(1, history, True)
    penalized = torch.where(logits_PV < 0, logits_PV * repetition, logits_PV / repetition)
    logits_PV = torch.where(seen, penalized, logits_PV)
    is_output = (positions >= choices.prompt_lengths_R[rows_P].unsqueeze(1)) & (positions < lengths)
    counts = torch.zeros_like(logits_PV).scatter_add_(1, history, is_output.float())
    logits_PV.sub_(counts * frequency).sub_(counts.clamp_(max=1) * presence)
    logits_RV[rows_P] = logits_PV


def _allow(logits_RV: Tensor, allowed: Allowed) -> None:
    vocabulary, rows_A = logits_RV.shape[1], allowed.rows_A.long()
    # Entries without a token go to a column behind the vocabulary.
    tokens_AW = allowed.tokens_AW.masked_fill(allowed.tokens_AW < 0, vocabulary).long()
    excluded_AV = torch.ones((len(rows_A), vocabulary + 1), dtype=torch.bool, device=logits_RV.device)
    excluded_AV = excluded_AV.scatter_(1, tokens_AW, False)[:, :vocabulary]
    logits_RV[rows_A] = logits_RV[rows_A].masked_fill_(excluded_AV, MINUS_INFINITY)


def _ban(logits_RV: Tensor, choices: Choices, bans: Bans) -> None:
    rows_E, offsets, tokens_E = bans.rows_E.long(), bans.offsets.long(), bans.tokens_E.long()
    own_E = choices.rows_R[rows_E]
    lengths_E = choices.lengths[own_E]
    # The ids X that all bans have before their tokens: ban and position of each id.
    bans_X = torch.repeat_interleave(offsets.diff(), output_size=len(bans.before))
    positions_X = lengths_E[bans_X] + torch.arange(len(bans_X), device=offsets.device) - offsets[bans_X + 1]
    ids_X = choices.history[own_E[bans_X], positions_X.clamp(min=0)]
    differs_X = (positions_X < 0) | (ids_X != bans.before)
    differences_E = torch.zeros_like(bans.tokens_E).index_add_(0, bans_X, differs_X.int())
    holds_E = (differences_E == 0) & (lengths_E - choices.prompt_lengths_R[rows_E] < bans.until_E)
    # Bans that do not hold add minus zero, which changes no number.
    values_E = torch.where(holds_E, MINUS_INFINITY, -0.0)
    logits_RV.index_put_((rows_E, tokens_E), values_E, accumulate=True)


def _mask(logits_RV: Tensor, masks: Masks) -> None:
    vocabulary, rows_M = logits_RV.shape[1], masks.rows_M.long()
    words_MW = masks.bits_MW[:, : -(-vocabulary // WORD_BITS)]
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=words_MW.device)
    is_excluded_MV = ((words_MW.unsqueeze(2) >> shifts & 1) == 0).flatten(1)[:, :vocabulary]
    logits_RV[rows_M] = logits_RV[rows_M].masked_fill_(is_excluded_MV, MINUS_INFINITY)


def _cut_tails(logits_RV: Tensor, choices: Choices) -> None:
    """Sets the tokens that top-k, top-p and min-p exclude to minus infinity, one option after the other."""
    values, order = logits_RV.sort(dim=1, descending=True, stable=True)
    peak = values[:, :1]
    rank = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    top_k = choices.top_k_R.unsqueeze(1)
    values.masked_fill_((top_k > 0) & (rank >= top_k), MINUS_INFINITY)
    top_p = choices.top_p_R.unsqueeze(1)
    weights = token_weights(halvings(values, peak))
    values.masked_fill_((top_p < 1) & (_before(weights) >= _target(top_p, weights)), MINUS_INFINITY)
    # A token is kept if its likelihood is at least min_p times the largest likelihood.
    values.masked_fill_(values < peak + choices.log_min_p_R.unsqueeze(1), MINUS_INFINITY)
    logits_RV.scatter_(1, order, values)


def _cut_untypical(logits_RV: Tensor, mass: Tensor) -> None:
    """Keeps the tokens whose surprise (-log p) is nearest to the entropy, until their probabilities sum to `mass`.

    A token's surprise is log2 of the sum of all likelihoods relative to the largest one, plus the token's halvings; the
    entropy is the mean of the surprises. So halvings and their mean have the same distance.

    Locally Typical Sampling, Meister et al. 2022 (https://arxiv.org/abs/2202.00666).
    """
    halvings_RV = halvings(logits_RV, logits_RV.amax(dim=1, keepdim=True))
    weights = token_weights(halvings_RV)
    products = weights * (halvings_RV.clamp(max=MAX_HALVINGS) * 2**20).long() >> 20
    mean = products.sum(dim=1, keepdim=True).double() / weights.sum(dim=1, keepdim=True).double()
    order = (halvings_RV - mean.float()).abs().sort(dim=1, stable=True).indices
    weights = weights.gather(1, order)
    cut = (mass < 1) & (_before(weights) >= _target(mass, weights))
    logits_RV.masked_fill_(torch.zeros_like(cut).scatter_(1, order, cut), MINUS_INFINITY)


def halvings(logits_RV: Tensor, peak_R1: Tensor) -> Tensor:
    """How many times a token's likelihood is half of the largest one in its row."""
    return (peak_R1 - logits_RV) * LOG2E


def token_weights(halvings_RV: Tensor) -> Tensor:
    """int64: 2^38 / 2^halvings, by the operations that `Kernels.sample` prescribes."""
    clamped = halvings_RV.clamp(max=MAX_HALVINGS)
    whole = clamped.int()
    f = clamped - whole
    y = f * HALVING[0] + HALVING[1]
    for coefficient in HALVING[2:]:
        y = y * f + coefficient
    return (y * 2**30).long() << 8 >> whole


def _target(share: Tensor, weights: Tensor) -> Tensor:
    """What the weights of the tokens before a kept token may not reach. It is at least 1: the first token stays."""
    return (share.double() * weights.sum(dim=1, keepdim=True).double()).long().clamp(min=1)


def _before(weights: Tensor) -> Tensor:
    """For each token, the sum of the weights before it, in rows that are sorted."""
    return F.pad(weights.cumsum(dim=1)[:, :-1], (1, 0))


def gumbel_noise(seeds_R: Tensor, positions_R: Tensor, vocabulary: int) -> Tensor:
    low, high = seeds_R.to(torch.int32), (seeds_R >> 32).to(torch.int32)
    key = _mix(_mix(_mix(low) ^ high) ^ positions_R.to(torch.int32))
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=seeds_R.device)
    bits = _mix(_mix(key.unsqueeze(1) ^ (tokens * -1640531535)) + key.unsqueeze(1))
    # v is uniform in (0, 1). It is exact to 32 bits near 0, where the noise is so large that it decides which token is
    # drawn.
    v = ((bits.long() & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v.clamp(max=1 - 2.0**-24)))


def _mix(x: Tensor) -> Tensor:
    """The 32-bit finalizer of the hash MurmurHash3 on int32, whose products wrap. Copies of the sign that `>>` makes
    are masked.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -2048144789
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


def advance(history: Tensor, lengths: Tensor, rows_R: Tensor, ids_R: Tensor) -> None:
    positions = lengths[rows_R]
    history[rows_R, positions] = ids_R.to(history.dtype)
    lengths[rows_R] = positions + 1


def place(
    rows_R: Tensor, slots_R: Tensor, history: Tensor, table: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    lengths_R = lengths[rows_R]
    positions_R = lengths_R - 1
    table[rows_R, positions_R] = slots_R
    return history[rows_R, positions_R], positions_R, lengths_R
