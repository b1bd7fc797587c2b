"""The dense torch reference: what every other backend must equal, on any device.

In float32 on a CPU it also keeps a promise the serving tests rely on: a row's result is the same to the bit whatever
else is in the batch. For that, keys are reduced in tiles of 64 from position 0, query rows are padded to at least 16
(a smaller matrix product takes another path through the BLAS), and tiles are added up one after the other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 64
MIN_QUERIES = 16
# How many scores a block of a prefill may hold at once (times 4 bytes): bounds the memory of long prompts.
MAX_SCORES = 1 << 23
# How many elements of keys and values a block of a decode may gather at once.
MAX_GATHERED = 1 << 23


def embed(ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    return F.embedding(ids_T, weight_VH)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    x = x_TH.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return weight_H * x.to(x_TH.dtype)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x_TH + residual_TH
    return rms_norm(total, weight_H, eps), total


def rope_and_store_kv(
    qkv: Tensor,
    heads: tuple[int, int],
    cos_LD: Tensor,
    sin_LD: Tensor,
    positions_T: Tensor,
    kv_SGD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    query_heads, kv_heads = heads
    qkv = qkv.view(qkv.shape[0], query_heads + 2 * kv_heads, -1)
    rotating = query_heads + kv_heads
    cos, sin = cos_LD[positions_T].unsqueeze(1), sin_LD[positions_T].unsqueeze(1)
    first, second = qkv[:, :rotating].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)
    kv_SGD[slots_T] = torch.cat([rotated[:, query_heads:], qkv[:, rotating:]], dim=1).to(kv_SGD.dtype)
    return rotated[:, :query_heads]


def attend_decode(
    q_RHD: Tensor, kv_SGD: Tensor, table: Tensor, rows_R: Tensor, lengths_R: Tensor, scale: float
) -> Tensor:
    longest = -(-int(lengths_R.max()) // TILE) * TILE
    block = max(1, MAX_GATHERED // (longest * kv_SGD[0].numel()))
    parts = zip(*(torch.split(t, block) for t in (q_RHD, rows_R, lengths_R)), strict=True)
    return torch.cat([_attend_decode(q, kv_SGD, table, rows, lengths, scale) for q, rows, lengths in parts])


def _attend_decode(
    q_RHD: Tensor, kv_SGD: Tensor, table: Tensor, rows_R: Tensor, lengths_R: Tensor, scale: float
) -> Tensor:
    rows, heads, size = q_RHD.shape
    kv_heads = kv_SGD.shape[1] // 2
    length = -(-int(lengths_R.max()) // TILE) * TILE
    valid_RL = torch.arange(length, device=q_RHD.device) < lengths_R.unsqueeze(1)
    keys, values = _gather(kv_SGD, table[rows_R, :length], valid_RL)
    group = heads // kv_heads
    q = q_RHD.view(rows, kv_heads, group, size)
    q = F.pad(q, (0, 0, 0, max(0, MIN_QUERIES - group)))
    out = _attend(q, keys, values, valid_RL.view(rows, 1, 1, -1), scale)
    return out[:, :, :group].reshape(rows, heads, size)


def attend_prefill(q_THD: Tensor, kv_SGD: Tensor, table: Tensor, row: int, start: int, scale: float) -> Tensor:
    tokens, heads, size = q_THD.shape
    kv_heads = kv_SGD.shape[1] // 2
    group = heads // kv_heads
    end = start + tokens
    positions = torch.arange(-(-end // TILE) * TILE, device=q_THD.device)
    keys, values = _gather(kv_SGD, table[row : row + 1, : len(positions)], (positions < end).unsqueeze(0))
    q = q_THD.view(tokens, kv_heads, group, size).transpose(0, 1)  # [G, T, group, D]
    block = max(MIN_QUERIES, MAX_SCORES // (heads * len(positions)))
    blocks = []
    for first in range(0, tokens, block):
        part = q[:, first : first + block]
        count = part.shape[1]
        tiles_end = -(-(start + first + count) // TILE) * TILE  # later keys are hidden from all queries of the block
        visible = positions[:tiles_end] <= torch.arange(count, device=q.device).add(start + first).unsqueeze(1)
        queries = part.reshape(1, kv_heads, count * group, size)
        visible = visible.repeat_interleave(group, dim=0)
        padding = max(0, MIN_QUERIES - count * group)
        queries = F.pad(queries, (0, 0, 0, padding))
        visible = F.pad(visible, (0, 0, 0, padding), value=True)
        out = _attend(queries, keys[:, :, :tiles_end], values[:, :, :tiles_end], visible, scale)
        blocks.append(out[0, :, : count * group].reshape(kv_heads, count, group, size))
    return torch.cat(blocks, dim=1).transpose(0, 1).reshape(tokens, heads, size)


def _gather(kv_SGD: Tensor, slots_RL: Tensor, valid_RL: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [R, G, L, D] of each row's slots, zeros at positions that are not valid."""
    kv_heads, nowhere = kv_SGD.shape[1] // 2, kv_SGD.shape[0] - 1
    slots_RL = F.pad(
        slots_RL, (0, valid_RL.shape[1] - slots_RL.shape[1]), value=nowhere
    )  # the table's last, short tile
    # What lies in a slot that is not the row's may be anything, NaN too, and 0 * NaN would not hide it: positions past
    # the end read the extra slot, which is nobody's.
    kv_SGD[nowhere] = 0
    slots_RL = slots_RL.masked_fill(~valid_RL, nowhere)
    gathered = kv_SGD.index_select(0, slots_RL.flatten()).view(*slots_RL.shape, *kv_SGD.shape[1:]).transpose(1, 2)
    return gathered[:, :kv_heads], gathered[:, kv_heads:]


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [R, G, M, D], keys and values [R, G, L, D] with L a multiple of TILE, visible broadcasts to [R, G, M, L]."""
    rows, kv_heads, queries, size = q.shape
    tiles = keys.shape[2] // TILE
    flat = rows * kv_heads
    q_flat = (q * scale).reshape(flat, queries, size).contiguous()
    k_tiles = keys.reshape(flat, tiles, TILE, size)
    v_tiles = values.reshape(flat, tiles, TILE, size)
    scores = torch.stack([torch.bmm(q_flat, k_tiles[:, t].transpose(1, 2)) for t in range(tiles)], dim=2).float()
    hidden = ~visible.expand(rows, kv_heads, queries, tiles * TILE).reshape(flat, queries, tiles, TILE)
    scores = scores.masked_fill(hidden, float("-inf"))
    peak = scores.amax(dim=(2, 3), keepdim=True)
    weights = torch.exp(scores - peak)
    sums = weights.sum(dim=3)
    weights = weights.to(q.dtype)
    total = sums[:, :, 0]
    out = torch.bmm(weights[:, :, 0], v_tiles[:, 0])
    for t in range(1, tiles):
        total = total + sums[:, :, t]
        out = torch.baddbmm(out, weights[:, :, t], v_tiles[:, t])
    return (out / total.unsqueeze(2).to(out.dtype)).view(rows, kv_heads, queries, size)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sample(logits_RV: Tensor, noise_RV: Tensor | None) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits_RV.float(), dim=-1)
    ids = torch.argmax(logprobs if noise_RV is None else logprobs + noise_RV, dim=-1)
    return ids, logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)


def gumbel_noise(seeds_R: Tensor, positions_R: Tensor, vocabulary: int) -> Tensor:
    low, high = seeds_R.to(torch.int32), (seeds_R >> 32).to(torch.int32)
    key = _mix(_mix(_mix(low) ^ high) ^ positions_R.to(torch.int32))
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=seeds_R.device)
    bits = _mix(_mix(key.unsqueeze(1) ^ (tokens * -1640531535)) + key.unsqueeze(1))
    # v is uniform in (0, 1) with all 32 bits near 0, which is where the noise is large and draws are decided.
    v = ((bits.long() & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v.clamp(max=1 - 2.0**-24)))


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer on int32, whose products wrap; `>>` must not drag the sign along."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -2048144789
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


def advance(history: Tensor, lengths: Tensor, rows_R: Tensor, ids_R: Tensor) -> None:
    positions = lengths[rows_R]
    history[rows_R, positions] = ids_R.to(history.dtype)
    lengths[rows_R] = positions + 1
