"""One table of tests for all backends, against the plainest mathematics there is. Unused slots hold NaN."""

import pytest
import torch
from torch import Tensor

from text_generation_server.kernels import reference
from text_generation_server.kernels.interface import Kernels

BACKENDS: list[Kernels] = [reference]  # type: ignore[list-item]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEAD = 16


@pytest.fixture(params=BACKENDS, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    kernels: Kernels = request.param
    return kernels


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


class Pool:
    """Rows of the given lengths in scattered slots; everything else is NaN."""

    def __init__(self, lengths: list[int], kv_heads: int, dtype: torch.dtype, width: int = 200) -> None:
        torch.manual_seed(len(lengths))
        order = torch.randperm(sum(lengths) + 50)
        self.kv = torch.full((len(order) + 1, 2 * kv_heads, HEAD), float("nan"), dtype=dtype)
        self.table = torch.zeros((len(lengths), width), dtype=torch.int32)
        self.keys, self.values = [], []
        for row, length in enumerate(lengths):
            slots, order = order[:length], order[length:]
            self.kv[slots] = torch.randn(length, 2 * kv_heads, HEAD).to(dtype)
            self.table[row, :length] = slots
            # Where a row has no token its table may say anything.
            self.table[row, length:] = int(order[0])
            self.keys.append(self.kv[slots, :kv_heads].float())
            self.values.append(self.kv[slots, kv_heads:].float())

    def attend(self, row: int, q_HD: Tensor, position: int) -> Tensor:
        """One query, the plain way, in float32."""
        group = q_HD.shape[0] // self.keys[row].shape[1]
        keys = self.keys[row][: position + 1].repeat_interleave(group, dim=1)
        values = self.values[row][: position + 1].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,lhd->hl", q_HD.float(), keys) * HEAD**-0.5
        return torch.einsum("hl,lhd->hd", scores.softmax(dim=1), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_decode_attends_to_its_own_row_and_to_nothing_else(kernels: Kernels, group: int, dtype: torch.dtype) -> None:
    lengths = [1, 2, 63, 64, 65, 127, 128, 129]
    pool = Pool(lengths, 2, dtype)
    q = torch.randn(len(lengths), 2 * group, HEAD).to(dtype)
    rows = torch.arange(len(lengths)).flip(0)
    out = kernels.attend_decode(q, pool.kv, pool.table, rows, torch.tensor(lengths)[rows], HEAD**-0.5)
    for i, row in enumerate(rows.tolist()):
        close(out[i], pool.attend(row, q[i], lengths[row] - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 64), (0, 130), (1, 3), (63, 66), (64, 65), (100, 199)])
def test_prefill_is_causal_over_prefix_and_chunk(
    kernels: Kernels, start: int, end: int, group: int, dtype: torch.dtype
) -> None:
    pool = Pool([5, end, 7], 2, dtype)
    q = torch.randn(end - start, 2 * group, HEAD).to(dtype)
    out = kernels.attend_prefill(q, pool.kv, pool.table, 1, start, HEAD**-0.5)
    for i in range(end - start):
        close(out[i], pool.attend(1, q[i], start + i))


def test_long_prefills_in_blocks_are_the_same(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool([150], 2, torch.float32)
    q = torch.randn(150, 4, HEAD)
    whole = kernels.attend_prefill(q, pool.kv, pool.table, 0, 0, 1.0)
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 192 * 40)
    monkeypatch.setattr(reference, "MAX_GATHERED", 192 * 4 * HEAD)
    assert torch.equal(kernels.attend_prefill(q, pool.kv, pool.table, 0, 0, 1.0), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope_turns_queries_and_keys_and_stores_keys_and_values(kernels: Kernels, dtype: torch.dtype) -> None:
    heads, kv_heads, tokens = 6, 2, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * HEAD).to(dtype)
    positions, slots = torch.tensor([3, 0, 7, 9, 1]), torch.tensor([8, 2, 0, 5, 9])
    angles = torch.outer(torch.arange(12).float(), 1 / 100 ** (torch.arange(0, HEAD, 2) / HEAD))
    kv = torch.full((11, 2 * kv_heads, HEAD), float("nan"), dtype=dtype)
    q = kernels.rope_and_store_kv(qkv.clone(), (heads, kv_heads), angles.cos(), angles.sin(), positions, kv, slots)
    states = qkv.view(tokens, -1, HEAD).float()
    turned = torch.view_as_complex(torch.stack(states.chunk(2, dim=-1), dim=-1))
    turned = torch.view_as_real(turned * torch.polar(torch.ones(5, 1, HEAD // 2), angles[positions].unsqueeze(1)))
    turned = torch.cat([turned[..., 0], turned[..., 1]], dim=-1)
    close(q, turned[:, :heads])
    close(kv[slots, :kv_heads], turned[:, heads : heads + kv_heads])
    assert torch.equal(kv[slots, kv_heads:], states[:, heads + kv_heads :].to(dtype))
    untouched = sorted(set(range(11)) - set(slots.tolist()))
    assert kv[untouched].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_are_those_of_the_formula(kernels: Kernels, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(7, 96).to(dtype), torch.randn(7, 96).to(dtype), torch.randn(96).to(dtype)
    y, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    exact = total.float() / (total.float().pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * weight.float()
    close(y, exact)
    close(kernels.rms_norm(total, weight, 1e-5), exact)


def test_silu_mul_takes_gate_first(kernels: Kernels) -> None:
    gate, up = torch.randn(3, 40), torch.randn(3, 40)
    close(kernels.silu_mul(torch.cat([gate, up], dim=1)), gate * torch.sigmoid(gate) * up)


def test_embed_picks_rows(kernels: Kernels) -> None:
    table = torch.randn(9, 4)
    assert torch.equal(kernels.embed(torch.tensor([8, 0, 8]), table), table[[8, 0, 8]])


def test_greedy_takes_the_first_of_equals_and_reports_its_logprob(kernels: Kernels) -> None:
    ids, logprobs = kernels.sample(torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0]]), None)
    assert ids.tolist() == [1, 0]
    close(logprobs, torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0]]).log_softmax(1)[[0, 1], ids])


def test_noise_depends_on_seed_position_and_token_alone(kernels: Kernels) -> None:
    seeds, positions = torch.tensor([5, 5, 6, -(2**63)]), torch.tensor([10, 11, 10, 10])
    noise = kernels.gumbel_noise(seeds, positions, 100)
    assert torch.equal(kernels.gumbel_noise(seeds[2:3], positions[2:3], 100)[0], noise[2])
    assert torch.equal(kernels.gumbel_noise(seeds, positions, 50), noise[:, :50])
    assert len({tuple(row.tolist()) for row in noise}) == 4


def test_draws_follow_the_distribution(kernels: Kernels) -> None:
    draws = 20_000
    logits = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01]).log()
    noise = kernels.gumbel_noise(torch.arange(draws), torch.full((draws,), 7), 5)
    ids, _ = kernels.sample(logits.expand(draws, 5), noise)
    shares = torch.bincount(ids, minlength=5) / draws
    torch.testing.assert_close(shares, logits.exp(), atol=0.015, rtol=0)


def test_advance_appends_to_the_history(kernels: Kernels) -> None:
    history, lengths = torch.zeros((3, 5), dtype=torch.int32), torch.tensor([2, 0, 4])
    kernels.advance(history, lengths, torch.tensor([2, 0]), torch.tensor([7, 9]))
    assert history.tolist() == [[0, 0, 9, 0, 0], [0] * 5, [0, 0, 0, 0, 7]]
    assert lengths.tolist() == [3, 0, 5]
