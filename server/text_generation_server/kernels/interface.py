"""The functions of every kernel backend, and their arguments. The package's docstring has the legend of shapes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from text_generation_common.models.architecture import Activation, ClampedGate
from text_generation_common.quantized.values import Weight

# Constants of the weights that `Kernels.sample` sums: see there.
LOG2E = 1.4426950216293335  # the float32 nearest to log2 e
MAX_HALVINGS = 40.0
HALVING = (-0.00094490015, 0.009205789, -0.05529735, 0.24018013, -0.6931437, 1.0)  # relative error 3e-7
WORD_BITS = 32  # tokens of a word of `Masks`


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of T tokens: P pairs (token, choice), K for each token. Pair p is choice p % K of token p // K."""

    scores_P: Tensor  # float32: the share of the pair's expert in the token's result
    pairs_P: Tensor  # int32: the pairs, in the order of their experts
    offsets: Tensor  # int32 [E + 1]: expert e has pairs_P[offsets[e] : offsets[e + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """E gated MLPs. Expert e computes down[e] · (silu(gate) * up) + down_bias[e], with gate and up the halves of
    gate_up[e] · x + gate_up_bias[e]; or what `clamped` says in the place of silu(gate) * up."""

    gate_up: Weight  # [E, 2I, H]
    down: Weight  # [E, H, I]
    gate_up_bias: Tensor | None = None  # [E, 2I]
    down_bias: Tensor | None = None  # [E, H]
    clamped: ClampedGate | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCodes:
    """One of `ExpertWeights`, whose weights are in any form. `gate_up` may be several weights, one after the other, and
    the product of `down` is multiplied by the `factor` before its bias is added."""

    gate_up: Sequence[Weight]  # [2I, H]
    down: Weight  # [H, I]
    gate_up_bias: Tensor | None = None  # [2I]
    down_bias: Tensor | None = None  # [H]
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class AdapterMatrices:
    """What S adapters add to a linear layer of P parts, which are outputs with matrices of their own. Part p of adapter
    s has the rank ranks[s, p], which is 0 if the adapter leaves the part as it is, and at most R. An embedding of K ids
    is one part, and R a multiple of 16."""

    down: Tensor  # [S, P * R, K], or of an embedding [S, K, R]; in x's type
    up: Tensor  # [S, R, N], the scale included; in x's type
    ranks: Tensor  # int32 [S, P]
    ends_P: Tensor  # int32: the output behind the last one of each part
    ends: tuple[int, ...]  # the same on the host
    bias: Tensor | None = None  # float32 [S, N]; -0 where an adapter changes nothing

    @property
    def rank(self) -> int:
        return self.up.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedPairs:
    """What S adapters add to the products of E experts, for each pair of `Routes.pairs_P`, in that order. The matrices
    of adapter s and expert e have the number s * E + e. None: no adapter changes the product."""

    kernels: "Kernels"
    slots_P: Tensor  # int32: the number of the matrices of each pair; -1: none
    gate_up: AdapterMatrices | None
    down: AdapterMatrices | None  # added before the pair's score multiplies the product

    def between(self, start: int, end: int) -> "AdaptedPairs":
        """The same for some of the pairs."""
        return replace(self, slots_P=self.slots_P[start:end])

    def of_gate_up(self, x: Tensor, routes: Routes | None = None) -> Tensor | None:
        """float32 [P, 2I], for x [P, H], or with routes x [T, H]."""
        return None if self.gate_up is None else self.kernels.adapt(x, self.slots_P, self.gate_up, routes)

    def of_down(self, x: Tensor) -> Tensor | None:
        """float32 [P, H], for x [P, I]."""
        return None if self.down is None else self.kernels.adapt(x, self.slots_P, self.down)


class ExpertKernel(Protocol):
    def __call__(self, x_TH: Tensor, routes: Routes, *, adapted: AdaptedPairs | None = None) -> Tensor:
        """What the experts of tokens [T, H] add up to, [T, H]. See `Kernels.experts`."""
        ...


class LinearKernel(Protocol):
    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        """A linear layer of x [T, K], see `Kernels.linear`. The result is written to `out`, if there is one: its rows
        may lie apart, so that several products fill one tensor. `addend` [T, N], in float32 or in y's type, is added
        before the bias: to gates and ups, if the layer is gated."""
        ...


@runtime_checkable
class HoldsRows(Protocol):
    """A linear layer from which its weight can be read, so that an embedding that is the same weight needs no copy."""

    @property
    def has_rows(self) -> bool: ...

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight in the type of x: exact numbers, rounded once. ids are int32. To be called only if
        `has_rows`."""
        ...


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Keys and values of one layer, one slot per token. The keys and values of padding are written to the extra slot.

    In 8 bits (int8, float8_e4m3fn) a number is `heads * scales`, with one scale for each slot and head.
    """

    heads: Tensor  # [S + 1, 2G, D], keys first
    scales: Tensor | None = None  # float32 [S + 1, 2G]

    @property
    def kv_heads(self) -> int:
        return self.heads.shape[1] // 2


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of single heads of queries and keys. The weights have the type of queries and keys, or are float32: see
    `Kernels.rms_norm`."""

    query_D: Tensor
    key_D: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """What a layer's attention makes of the products of a query and the keys, in the order of these fields."""

    scale: float  # multiplies the products; the result is the key's score
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    slopes_H: Tensor | None = None  # float32: scores grow by slope * (position of the key - position of the query)
    sinks_H: Tensor | None = None  # float32: the score of one more key, whose value is 0
    window: int | None = None  # a query sees the keys of this many positions, its own included; None: all up to its own

    def first_seen(self, position: int) -> int:
        """The first position that a query sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class Segments:
    """C runs of consecutive tokens of a step. Each run is a chunk of one row's prompt.

    Run c is the tokens offsets[c] … offsets[c + 1] - 1 of the step, at positions from starts[c] on. Runs may be empty.
    """

    rows_C: Tensor  # int32
    starts_C: Tensor  # int32
    offsets: Tensor  # int32 [C + 1]
    tokens: int  # in all runs; may be more where the rows R of `Kernels.attend` are as many as the step's tokens

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """(first token, row, first position, position after the last) of each run. Waits for the device."""
        columns = self.offsets.tolist(), self.rows_C.tolist(), self.starts_C.tolist()
        for first, last, row, start in zip(columns[0], columns[0][1:], *columns[1:], strict=False):
            if first < last:
                yield first, row, start, start + last - first


@dataclass(frozen=True, slots=True)
class Bias:
    """Numbers added to the logits of some tokens of each of R rows; a row names a token at most once."""

    tokens_RB: Tensor  # int32; -1 where a row has fewer tokens
    values_RB: Tensor  # float32


@dataclass(frozen=True, slots=True)
class Allowed:
    """The only tokens that A of R rows can choose. Each row lists at most 1,024, and at least one."""

    rows_A: Tensor  # int32: indices of these rows among the R rows
    tokens_AW: Tensor  # int32; -1 where a row has fewer tokens


@dataclass(frozen=True, slots=True)
class Bans:
    """E tokens that some of R rows cannot choose. A ban holds while the row's output has fewer than `until` tokens, and
    only if the row's history ends with the ids in `before` that belong to the ban."""

    rows_E: Tensor  # int32: indices among the R rows
    tokens_E: Tensor  # int32: the tokens
    until_E: Tensor  # int32
    offsets: Tensor  # int32 [E + 1]: ban e holds after before[offsets[e] : offsets[e + 1]]
    before: Tensor  # int32


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that M of R rows can choose, as one bit for each token. Each of these rows has one mask."""

    rows_M: Tensor  # int32: indices among the R rows
    # int32 [M, ceil(V / 32)] or wider, rows contiguous: bit v & 31 of word v >> 5 is 1 if token v can be chosen. Bits
    # and words behind the V tokens are not used.
    bits_MW: Tensor


@dataclass(frozen=True, slots=True)
class Choices:
    """How each of R rows chooses its next token.

    The comment after a field gives its type and its neutral value, which leaves a row's logits unchanged to the bit.
    The flags `any_…`, known on the host, say whether any row has another value, so that kernels that no row needs are
    not launched.
    """

    rows_R: Tensor  # int32, indices into history and lengths
    history: Tensor  # int32 [rows, L]: token ids by position
    lengths: Tensor  # int32 [rows]: number of known tokens, which is the position of the next token
    prompt_lengths_R: Tensor  # int32: the tokens after the prompt are the output
    draws_R: Tensor  # bool: draw the token; False: take the best token
    seeds_R: Tensor  # int64
    temperature_R: Tensor  # float32; neutral: 1
    top_k_R: Tensor  # int32; neutral: 0
    top_p_R: Tensor  # float32; neutral: 1
    log_min_p_R: Tensor  # float32: log(min_p), computed on the host; neutral: minus infinity
    typical_p_R: Tensor  # float32; neutral: 1
    repetition_penalty_R: Tensor  # float32; neutral: 1
    frequency_penalty_R: Tensor  # float32; neutral: 0
    presence_penalty_R: Tensor  # float32; neutral: 0
    bias: Bias | None
    allowed: Allowed | None
    bans: Bans | None
    any_draws: bool
    any_penalties: bool
    any_cuts: bool  # whether any row uses top-k, top-p, min-p or typical-p
    any_typical: bool
    masks: Masks | None = None  # None in the plan of a batch, because masks change with each step

    @property
    def any_masks(self) -> bool:
        """Whether tokens may be excluded before any cut."""
        return self.allowed is not None or self.bans is not None or self.masks is not None

    @property
    def any_changes(self) -> bool:
        """Whether any row's logits are changed token by token."""
        return self.bias is not None or self.any_penalties or self.any_masks


@dataclass(frozen=True, slots=True)
class Chosen:
    ids_R: Tensor  # int32
    # float32, in the distribution from which the token was drawn; minus infinity for a row without a token that is left
    logprobs_R: Tensor
    # bool: False if a logit of the row was NaN or infinite: id and log-probability are then 0; or if masks have left no
    # token: then the id is 0
    finite_R: Tensor
    # The three results in one buffer, int32 [3, W], if the kernel has written them there. One copy moves them all.
    words: Tensor | None = None

    @staticmethod
    def in_words(words: Tensor, rows: int) -> "Chosen":
        """The results of `rows` rows, as views of a buffer int32 [3, W] with W at least `rows`."""
        finite_R = words[2].view(torch.bool)[:rows]
        return Chosen(words[0, :rows], words[1].view(torch.float32)[:rows], finite_R, words)


class Kernels(Protocol):
    def linear(
        self, weight: Weight, bias: Tensor | None, *, gated: bool, x_type: torch.dtype, y_type: torch.dtype,
        factor: float = 1.0,
    ) -> LinearKernel:  # fmt: skip
        """A layer that computes y = factor * x Wᵀ + b for a weight [N, K]. A dense weight has no factor but 1.

        `gated`: the first half of the outputs are gates, and y [T, N / 2] = silu(gate) * up.
        """
        ...

    def adapt(self, x: Tensor, slots_T: Tensor, matrices: AdapterMatrices, routes: Routes | None = None) -> Tensor:
        """What the tokens' adapters add to the outputs of a linear layer of x [T, K]: float32 [T, N]. slots are int32:
        the adapter of each token; -1: none. What has no adapter gets -0, which changes no sum. A token's result
        depends on the token and its adapter only. With routes it is [P, N], slots are those of `pair_slots`, and x is
        that of each pair's token."""
        ...

    def pair_slots(self, slots_T: Tensor, routes: Routes) -> Tensor:
        """int32 [P], for pairs in the order of `Routes.pairs_P`: slot * E + expert, for the slot of the pair's token
        in `adapt`; -1: none."""
        ...

    def adapt_embeddings(self, x_TH: Tensor, ids_T: Tensor, slots_T: Tensor, matrices: AdapterMatrices) -> Tensor:
        """The embeddings x of ids, and what the tokens' adapters add to them, which is rounded to x's type together
        with them. ids and slots are int32, slots as in `adapt`."""
        ...

    def embed(self, ids_T: Tensor, weight_VH: Tensor) -> Tensor:
        """Rows of the embedding table. ids are int32."""
        ...

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """x / rms(x) in float32, rounded to x's type, then times the weight (transformers' order). A float32 weight
        multiplies before the rounding."""
        ...

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); the sum is rounded to x's type first. May write into its inputs."""
        ...

    def rms_norm_part(self, x_TN: Tensor, part: range, weight: Tensor, eps: float) -> None:
        """Replaces x[:, part] by its rms_norm, with a weight for each of these columns."""
        ...

    def rope_and_store_kv(
        self, qkv: Tensor, heads: tuple[int, int], rotary: tuple[Tensor, Tensor], positions_T: Tensor, kv: KvLayer,
        slots_T: Tensor, norms: HeadNorms | None = None,
    ) -> Tensor:  # fmt: skip
        """Splits qkv [T, (H + 2G) * D] with heads = (H, G). Writes rotated keys and the values into their slots.
        Returns the rotated queries [T, H, D], which may be a view of qkv. rotary is (cos, sin), float32 [L, D / 2].
        positions and slots are int32. With `norms`, queries and keys are normalised before they are rotated.

        8-bit numbers are rounded to the nearest. Their scale is the head's largest magnitude divided by the type's
        largest number, and at least 1e-6.
        """
        ...

    def attend(
        self, q_THD: Tensor, kv: KvLayer, table: Tensor, rows_R: Tensor, lengths_R: Tensor, segments: Segments | None,
        options: AttentionOptions,
    ) -> Tensor:  # fmt: skip
        """Attention of a step's queries, each over its row's slots table[row, :position + 1], or over the last of them
        that a window holds; slots before the window are not read.

        Token t < R is a query of row rows[t] at position lengths[t] - 1; the segments' tokens come after the last of
        these queries. In a step with segments the last lengths may be 0: token t is then not a query of rows[t], and
        may be a token of a segment.

        Returns [T, H, D], with zeros for the tokens that are not queries. The content of kv's extra slot is undefined
        before and after the call. All indices are int32. A row's result depends on the row only, and the result of a
        decoding row does not depend on whether the step has segments.
        """
        ...

    def layer_norm(self, x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias in float32, rounded to x's type at the end."""
        ...

    def add_layer_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(layer_norm(x + residual), x + residual); the sum is rounded to x's type first. May write into its inputs."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, of two tensors of one shape. May write into its inputs."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu of the first half of gate_up [T, 2I] times the second half, [T, I]."""
        ...

    def activate(self, x: Tensor, activation: Activation, gated: bool) -> Tensor:
        """The activation of x [T, I]. `gated`: that of the first half of x [T, 2I] times the second half, [T, I]."""
        ...

    def route(self, logits_TE: Tensor, chosen: int, over_chosen: bool) -> Routes:
        """Chooses the `chosen` experts with the largest logits for each token; of equal logits, the first experts.
        Scores are shares of a softmax in float32 over all experts, or over the chosen ones with `over_chosen`. Padding
        may follow each row of the logits in memory."""
        ...

    def experts(
        self, x_TH: Tensor, routes: Routes, weights: ExpertWeights, adapted: AdaptedPairs | None = None
    ) -> Tensor:
        """The sum of each token's experts, weighted with their scores, [T, H]. A token's result depends on the token
        only. Weights of experts without tokens are not read. What adapters add is added before biases."""
        ...

    def experts_of_codes(
        self, experts: Iterable[ExpertCodes], clamped: ClampedGate | None, x_type: torch.dtype
    ) -> ExpertKernel | None:
        """`experts` for weights in any form, which may be copied. None, if these kernels cannot multiply by them
        without looking at the routes first."""
        ...

    def add_scored(
        self, x_TH: Tensor, y_TH: Tensor, inputs_TH: Tensor, weight_H: Tensor, addend: Tensor | None = None
    ) -> Tensor:
        """x + y / (1 + e^-(inputs · weight + addend)) for each token, in float32, rounded to x's type at the end. The
        addend is the first of a row of `addend`, float32 [T, N]; None: 0. May write into x."""
        ...

    def sample(self, logits_RV: Tensor, choices: Choices) -> Chosen:
        """Applies bias, repetition penalty, frequency penalty, presence penalty, allowed tokens, bans, masks,
        temperature, top-k, top-p, min-p and typical-p, in this order. Then takes the token with the largest logit +
        Gumbel noise; of equal ones the lowest id. Top-k, top-p and min-p always keep the most likely token, and
        typical-p the most typical token.

        The logits are float32, and are overwritten with the logits of the distribution from which the token was drawn:
        minus infinity for tokens that were excluded, zeros for a row whose result is invalid (`Chosen.finite_R`). A
        logit that is not finite makes its row invalid even if masks exclude the token. The noise is a pure function of
        (seed, position, token). A row may be longer than V in memory: no number after the V logits is used.

        All backends keep the same tokens, whatever the order in which they sum: top-p and typical-p sum integers. With
        h = (peak - logit) * float32(log2 e), and peak the largest logit of the row after the temperature, a token
        weighs 2^38 / 2^h, computed so (every operation is one of float32, rounded to the nearest, and none is fused
        with the next):

            h = min(h, 40), f = h - trunc(h), y = 2^-f by the polynomial `HALVING` in Horner's order
            weight = trunc(y * 2^30) << 8 >> trunc(h), in 64 bits

        Tokens are kept in the order of their logits, or of |h - mean| for typical-p, of equal ones the lowest id first,
        while the weights before them sum to less than trunc(p * total), a product in float64, and at least 1. `total`
        is the sum over the tokens that earlier cuts have kept, and mean = float32(total of (weight * trunc(2^20 h) >>
        20) / total), a quotient in float64. Min-p keeps the logits that are at least peak + log_min_p, in float32.
        """
        ...

    def sorts(self) -> bool:
        """Whether `sample` sorts the rows that ask for a cut, which takes about 25 ms of a row of 128,256 logits."""
        ...

    def vocabulary_part(self, vocab_size: int, ranks: int) -> int:
        """Number of token ids of each rank's part of the vocabulary, with padding. The part of rank r begins at id
        r * vocabulary_part."""
        ...

    def splits_draws(self, part: int) -> bool:
        """Whether `reduce_part` and `merge_parts` give the same bits as `sample`, for parts of this many ids."""
        ...

    def reduce_part(self, logits_RV: Tensor, choices: Choices, ids: range) -> Tensor:
        """`sample` for a rank that has the logits of `ids` only, and behind them padding. No row may ask for a bias, a
        penalty, a mask or a cut. Returns int32 [X, R, B], of the same shape on all ranks, which only `merge_parts`
        reads."""
        ...

    def merge_parts(self, parts: list[Tensor], vocab_size: int) -> Chosen:
        """The tokens that `sample` would choose from the logits of all ids, given the parts of all ranks in order."""
        ...

    def place(
        self, rows_R: Tensor, slots_R: Tensor, history: Tensor, table: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Prepares a decode step: table[row, length - 1] = slot, for each of the rows with its length. Returns (ids,
        positions, lengths), int32 [R]: the newest token of each row, that token's position, and the row's length."""
        ...

    def advance(self, history: Tensor, lengths: Tensor, rows_R: Tensor, ids_R: Tensor) -> None:
        """Ends a step: history[row, length] = id, then length += 1, for each of the rows. All tensors are int32."""
        ...
