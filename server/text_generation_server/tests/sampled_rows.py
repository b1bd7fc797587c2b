"""Rows to sample, in tests of all backends: their parameters, the kernels' arguments, and what a plain computation in
float64 leaves of them."""

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from text_generation_server.kernels.interface import WORD_BITS, Allowed, Bans, Bias, Choices, Chosen, Kernels, Masks

MINUS_INFINITY = float("-inf")
VOCABULARY = 40


@dataclass(frozen=True)
class Row:
    draws: bool = True
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    allowed: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()
    mask: tuple[int, ...] | None = None  # the tokens whose bits are 1
    ends: tuple[int, ...] = ()
    least: int = 0  # number of output tokens until which no token of `ends` is chosen
    bias: tuple[tuple[int, float], ...] = ()
    history: tuple[int, ...] = (3, 4, 5, 5, 4, 5)
    prompt_length: int = 2


def choices(rows: list[Row], device: torch.device) -> Choices:
    """Sampling arguments for `rows`. These rows lie in reverse order among other rows, whose history contains invalid
    ids."""
    count = len(rows)
    width = max(len(row.history) for row in rows) + 3
    history = torch.full((count + 2, width), 10**9, dtype=torch.int32)
    lengths = torch.zeros(count + 2, dtype=torch.int32)
    places = torch.arange(count, 0, -1, dtype=torch.int32)
    for row, place in zip(rows, places.tolist(), strict=True):
        history[place, : len(row.history)] = torch.tensor(row.history)
        lengths[place] = len(row.history)

    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=device)

    return Choices(
        places.to(device), history.to(device), lengths.to(device), column("prompt_length", torch.int32),
        column("draws", torch.bool), column("seed", torch.int64), column("temperature"), column("top_k", torch.int32),
        column("top_p"), column("min_p").log(), column("typical_p"), column("repetition"), column("frequency"),
        column("presence"), biases(rows, device), allowed_tokens(rows, device), bans(rows, device),
        any_draws=any(row.draws for row in rows),
        any_penalties=any(row.repetition != 1 or row.frequency != 0 or row.presence != 0 for row in rows),
        any_cuts=any(row.top_k or row.min_p or row.top_p < 1 or row.typical_p < 1 for row in rows),
        any_typical=any(row.typical_p < 1 for row in rows), masks=masks(rows, device),
    )  # fmt: skip


def biases(rows: list[Row], device: torch.device) -> Bias | None:
    width = max(len(row.bias) for row in rows)
    if not width:
        return None
    padded = [[*row.bias, *[(-1, 9.0)] * (width - len(row.bias))] for row in rows]
    tokens, values = torch.tensor(padded, dtype=torch.float64).unbind(2)
    return Bias(tokens.int().contiguous().to(device), values.float().contiguous().to(device))


def allowed_tokens(rows: list[Row], device: torch.device) -> Allowed | None:
    asking = [i for i, row in enumerate(rows) if row.allowed]
    if not asking:
        return None
    width = max(len(rows[i].allowed) for i in asking)
    tokens = [[*rows[i].allowed, *[-1] * (width - len(rows[i].allowed))] for i in asking]
    return Allowed(*(torch.tensor(values, dtype=torch.int32, device=device) for values in (asking, tokens)))


def bans(rows: list[Row], device: torch.device) -> Bans | None:
    asked = [(i, token, row.least, ()) for i, row in enumerate(rows) for token in row.ends]
    asked += [(i, word[-1], 2**31 - 1, word[:-1]) for i, row in enumerate(rows) for word in row.words]
    if not asked:
        return None
    numbers, tokens, until, before = zip(*asked, strict=True)
    offsets = [0, *accumulate(map(len, before))]
    columns = (numbers, tokens, until, offsets, list(chain.from_iterable(before)))
    return Bans(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))


def masks(rows: list[Row], device: torch.device, words: int = 64) -> Masks | None:
    masked = [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return None
    bits = torch.zeros(len(masked), words * WORD_BITS, dtype=torch.int64)
    for own, (_, tokens) in zip(bits, masked, strict=True):
        own[list(tokens)] = 1
    packed = (bits.view(len(masked), words, WORD_BITS) << torch.arange(WORD_BITS)).sum(dim=2)
    return Masks(torch.tensor([i for i, _ in masked], dtype=torch.int32, device=device), packed.int().to(device))


def sample(subject: Any, logits: Tensor, rows: list[Row]) -> tuple[Tensor, Chosen]:
    """The logits after sampling, and the chosen tokens, both on the host."""
    left = logits.clone().to(subject.device)
    chosen = subject.kernels.sample(left, choices(rows, subject.device))
    return left.cpu(), Chosen(chosen.ids_R.cpu(), chosen.logprobs_R.cpu(), chosen.finite_R.cpu())


def plain(logits: Tensor, row: Row) -> Tensor:
    """Log-probabilities of the distribution from which a row draws, by a plain computation in float64."""
    x = logits.double().tolist()
    for token, value in row.bias:
        x[token] += value
    for token in set(row.history):
        x[token] = x[token] * row.repetition if x[token] < 0 else x[token] / row.repetition
    for token in row.history[row.prompt_length :]:
        x[token] -= row.frequency
    for token in set(row.history[row.prompt_length :]):
        x[token] -= row.presence
    x = [value / row.temperature for value in x]
    allowed = (set(row.allowed) or set(range(len(x)))) - banned(row)
    if row.mask is not None:
        allowed &= set(row.mask)
    alive = sorted(allowed, key=lambda token: (-x[token], token))
    alive = alive[: row.top_k] if row.top_k else alive
    p = likelihoods(x, alive)
    alive = [token for i, token in enumerate(alive) if i == 0 or row.top_p >= 1 or sum(p[:i]) < row.top_p]
    p = likelihoods(x, alive)
    alive = [token for i, token in enumerate(alive) if p[i] >= row.min_p * p[0]]
    if row.typical_p < 1:
        logprobs = torch.tensor(likelihoods(x, alive), dtype=torch.float64).log()
        entropy = -(logprobs.exp() * logprobs).sum()
        distance = dict(zip(alive, (-logprobs - entropy).abs().tolist(), strict=True))
        alive = sorted(alive, key=lambda token: (round(distance[token], 9), token))
        p = likelihoods(x, alive)
        alive = [token for i, token in enumerate(alive) if i == 0 or sum(p[:i]) < row.typical_p]
    out = torch.full((len(x),), MINUS_INFINITY, dtype=torch.float64)
    out[alive] = torch.tensor(likelihoods(x, alive), dtype=torch.float64).log()
    return out


def banned(row: Row) -> set[int]:
    ends = set(row.ends) if len(row.history) - row.prompt_length < row.least else set()
    return ends | {word[-1] for word in row.words if row.history[-len(word) + 1 or len(row.history) :] == word[:-1]}


def likelihoods(x: list[float], tokens: list[int]) -> list[float]:
    return torch.tensor([x[token] for token in tokens], dtype=torch.float64).softmax(0).tolist()


def random_logits(rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Tensor:
    """Random logits; in each row some logits are equal."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    logits[:, 11:14] = logits[:, 10:11]
    return logits


class Recording:
    """Kernels that record the arguments of `sample`."""

    def __init__(self, kernels: Kernels, sorts: bool = False) -> None:
        self.given: list[Choices] = []
        self._kernels = kernels
        self._sorts = sorts

    def sorts(self) -> bool:
        return self._sorts

    def splits_draws(self, part: int) -> bool:
        return True

    def sample(self, logits_RV: Tensor, choices: Choices) -> Chosen:
        self.given.append(choices)
        return self._kernels.sample(logits_RV, choices)
