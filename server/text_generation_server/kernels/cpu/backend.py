"""`interface.Kernels` on a CPU. Biases, penalties, and sizes that the C code does not support, are computed by the
reference.
"""

from collections.abc import Iterable
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from text_generation_common.flags.kinds import ActivationType
from text_generation_common.models.architecture import Activation, ClampedGate
from text_generation_common.quantized.values import Dense, Weight
from text_generation_server.device.arena import SharedPages, ask_for_huge_pages
from text_generation_server.kernels import reference
from text_generation_server.kernels.cpu.build import CONSTANTS
from text_generation_server.kernels.cpu.codes import CodesLinear
from text_generation_server.kernels.cpu.experts_of_codes import ExpertProducts, ExpertsOfCodes, linears_of
from text_generation_server.kernels.cpu.ints import IntLinear, refuse_kind
from text_generation_server.kernels.cpu.library import TYPES, Argument, Library
from text_generation_server.kernels.cpu.linear import Float32Linear, Gated, PackedLinear, Scratch, packable
from text_generation_server.kernels.interface import (
    WORD_BITS,
    AdaptedPairs,
    AdapterMatrices,
    AttentionOptions,
    Choices,
    Chosen,
    ExpertCodes,
    ExpertKernel,
    ExpertWeights,
    HeadNorms,
    KvLayer,
    LinearKernel,
    Masks,
    Routes,
    Segments,
)
from text_generation_server.kernels.products import torch_linear

LANES = 16
MAX_HEAD_SIZE = CONSTANTS["MAX_HEAD_SIZE"]
# Least number of tokens of a prompt chunk that is computed in blocks of queries, not token by token.
SHORTEST_CHUNK = 8
# Such a chunk is computed split by split if it has at most this many queries of one key head, there are at least
# LEAST_SPLITS for each thread, and the states of all such chunks of a step fit into MAX_STATE_BYTES.
MAX_SPLIT_QUERIES = 256
LEAST_SPLITS = 4
MAX_STATE_BYTES = 128 << 20
QUERIES_OF_BLOCK = 32
SPLIT_KEYS = CONSTANTS["SPLIT_KEYS"]
# Most numbers that one thread alone computes: a smaller kernel is finished before other threads would be awake.
WORTH_THREADS = 32768
CHUNK_KEYS = CONSTANTS["CHUNK_KEYS"]
CUT_BUCKETS = CONSTANTS["CUT_BUCKETS"]
NO_NORMS: dict[str, Argument] = dict.fromkeys(("query_norm", "key_norm", "norm_type", "eps"))
NO_MASKS: dict[str, Argument] = dict.fromkeys(("masks", "mask_stride", "masked_rows", "masked"), 0)

Run = tuple[int, int, int]


class CpuKernels:
    """The CPU's kernels. All tensors must be contiguous, except queries, which may be a view of the fused product of q,
    k and v.
    """

    def __init__(self, library: Library, threads: int, activations: ActivationType = ActivationType.model) -> None:
        self.name = f"cpu ({library.target})"
        self.library = library
        self.threads = threads
        self._activations = activations
        self.has_int_products = self.has_int_experts = False  # whether layers, and experts, have integers of x
        # QUERY_LANES of words.h, and BLOCK_QUERIES of chunk.c
        self.block_queries = 32 if library.target.startswith(("avx512", "amx")) else 16
        self._scratch = Scratch()
        self._pages = SharedPages()
        self._cut_scratch = torch.empty(0, dtype=torch.int64)

    def linear(
        self, weight: Weight, bias: Tensor | None, *, gated: bool, x_type: torch.dtype, y_type: torch.dtype,
        factor: float = 1.0,
    ) -> LinearKernel:  # fmt: skip
        library, threads, pages = self.library, self.threads, self._pages
        if self._activations is ActivationType.int8 and not isinstance(weight, Dense):
            return self._by_ints(weight, bias, gated, factor, x_type=x_type, y_type=y_type)
        if x_type == torch.bfloat16 and library.has("gemm") and (rows := packable(weight, gated, factor)) is not None:
            return PackedLinear(
                library, threads, self._scratch, pages, weight=rows, bias=bias, gated=gated, y_type=y_type
            )
        if not {x_type, y_type} <= {torch.float32, torch.bfloat16}:
            return torch_linear(
                weight, bias, gated=gated, x_type=x_type, y_type=y_type, factor=factor, silu_mul=self.silu_mul
            )
        if isinstance(weight, Dense) and {weight.values.dtype, x_type, y_type} == {torch.float32}:
            linear = Float32Linear(library, threads, pages, weight.values, bias)
            return Gated(linear, self.silu_mul) if gated else linear
        return self._by_codes(weight, bias, gated, factor, x_type=x_type, y_type=y_type)

    def _by_codes(
        self, weight: Weight, bias: Tensor | None, gated: bool, factor: float, *, x_type: torch.dtype,
        y_type: torch.dtype,
    ) -> CodesLinear:  # fmt: skip
        return CodesLinear(
            self.library, self.threads, self._scratch, self._pages, weight=weight, bias=bias, gated=gated,
            x_type=x_type, y_type=y_type, factor=factor,
        )  # fmt: skip

    def _by_ints(
        self, weight: Weight, bias: Tensor | None, gated: bool, factor: float, *, x_type: torch.dtype,
        y_type: torch.dtype,
    ) -> IntLinear:  # fmt: skip
        if isinstance(weight, Dense):
            raise refuse_kind("weights that are not quantized")
        self.has_int_products = True
        return IntLinear(
            self.library, self.threads, self._scratch, self._pages, weight=weight, bias=bias, gated=gated,
            x_type=x_type, y_type=y_type, factor=factor,
        )  # fmt: skip

    def pair_slots(self, slots_T: Tensor, routes: Routes) -> Tensor:
        slots_P = torch.empty(len(routes.pairs_P), dtype=torch.int32)
        self._call(
            len(slots_P), "pair_slots", slots=slots_T, pairs=routes.pairs_P, offsets=routes.offsets,
            experts=len(routes.offsets) - 1, chosen=len(slots_P) // len(slots_T), out=slots_P,
        )  # fmt: skip
        return slots_P

    def adapt(self, x: Tensor, slots_T: Tensor, matrices: AdapterMatrices, routes: Routes | None = None) -> Tensor:
        inputs, (_, rank, columns), tokens = x.shape[1], matrices.up.shape, len(slots_T)
        if inputs % LANES or any(end % LANES for end in matrices.ends):
            return reference.adapt(x, slots_T, matrices, routes)
        x, parts, kind = x.contiguous(), matrices.ranks.shape[1], TYPES[x.dtype]
        hidden, out = torch.empty((tokens, parts * rank)), torch.empty((tokens, columns))
        ask_for_huge_pages(out)
        common: dict[str, Argument] = {
            "tokens": tokens, "slots": slots_T, "ranks": matrices.ranks, "parts": parts, "rank": rank,
            "type": kind, "hidden": hidden,
        }  # fmt: skip
        self._call(
            tokens * parts * rank * inputs, "adapt_down", x=x, pairs=None if routes is None else routes.pairs_P,
            chosen=tokens // len(x), inputs=inputs, down=matrices.down, **common,
        )  # fmt: skip
        self._call(
            tokens * rank * columns, "adapt_up", up=matrices.up, bias=matrices.bias, base=None, ends=matrices.ends_P,
            columns=columns, out=out, **common,
        )  # fmt: skip
        return out

    def adapt_embeddings(self, x_TH: Tensor, ids_T: Tensor, slots_T: Tensor, matrices: AdapterMatrices) -> Tensor:
        (tokens, width), (_, vocabulary, rank) = x_TH.shape, matrices.down.shape
        if width % LANES:
            return reference.adapt_embeddings(x_TH, ids_T, slots_T, matrices)
        hidden, out = torch.empty((tokens, rank)), torch.empty_like(x_TH)
        common: dict[str, Argument] = {
            "tokens": tokens, "slots": slots_T, "rank": rank, "type": TYPES[x_TH.dtype], "hidden": hidden,
        }  # fmt: skip
        self._call(tokens * rank, "adapt_ids", ids=ids_T, down=matrices.down, vocabulary=vocabulary, **common)
        self._call(
            tokens * rank * width, "adapt_up", up=matrices.up, bias=None, base=x_TH, ranks=matrices.ranks, parts=1,
            ends=matrices.ends_P, columns=width, out=out, **common,
        )  # fmt: skip
        return out

    def embed(self, ids_T: Tensor, weight_VH: Tensor) -> Tensor:
        out = torch.empty((len(ids_T), weight_VH.shape[1]), dtype=weight_VH.dtype)
        row_bytes = weight_VH.shape[1] * weight_VH.element_size()
        self._call(out.nbytes, "embed", ids=ids_T, tokens=len(ids_T), weight=weight_VH, row_bytes=row_bytes, out=out)
        return out

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        if x_TH.shape[1] % LANES:
            return reference.rms_norm(x_TH, weight_H, eps)
        out = torch.empty_like(x_TH)
        self._norm(x_TH, None, weight_H, eps, out)
        return out

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x_TH.shape[1] % LANES:
            return reference.add_rms_norm(x_TH, residual_TH, weight_H, eps)
        self._norm(x_TH, residual_TH, weight_H, eps, x_TH)
        return x_TH, residual_TH

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        self._call(
            x.numel(), "rms_norm", x=x, residual=residual, tokens=x.shape[0], width=x.shape[1], type=TYPES[x.dtype],
            weight=weight, weight_type=TYPES[weight.dtype], eps=eps, out=out,
        )  # fmt: skip

    def rms_norm_part(self, x_TN: Tensor, part: range, weight: Tensor, eps: float) -> None:
        if len(part) % LANES:
            reference.rms_norm_part(x_TN, part, weight, eps)
            return
        x = x_TN[:, part.start : part.stop]
        self._call(
            x.numel(), "rms_norm_part", x=x, tokens=x.shape[0], stride=x.stride(0), width=len(part),
            type=TYPES[x.dtype], weight=weight, weight_type=TYPES[weight.dtype], eps=eps,
        )  # fmt: skip

    def rope_and_store_kv(
        self,
        qkv: Tensor,
        heads: tuple[int, int],
        rotary: tuple[Tensor, Tensor],
        positions_T: Tensor,
        kv: KvLayer,
        slots_T: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        tokens, size = qkv.shape[0], kv.heads.shape[2]
        if not _fits(size):
            return reference.rope_and_store_kv(
                qkv, heads, rotary, positions_T=positions_T, kv=kv, slots_T=slots_T, norms=norms
            )
        cos, sin = rotary
        self._call(
            qkv.numel(), "rope_and_store", qkv=qkv, tokens=tokens, heads=heads[0], kv_heads=heads[1], head_size=size,
            type=TYPES[qkv.dtype], cos=cos, sin=sin, positions=positions_T, kv=kv.heads, kv_scales=kv.scales,
            kv_type=TYPES[kv.heads.dtype], slots=slots_T, **_norm_words(norms),
        )  # fmt: skip
        return qkv.view(tokens, -1, size)[:, : heads[0]]

    def attend(
        self,
        q_THD: Tensor,
        kv: KvLayer,
        table: Tensor,
        rows_R: Tensor,
        lengths_R: Tensor,
        segments: Segments | None,
        options: AttentionOptions,
    ) -> Tensor:
        if not _fits(q_THD.shape[2]):
            return reference.attend(
                q_THD, kv, table, rows_R=rows_R, lengths_R=lengths_R, segments=segments, options=options
            )
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        if segments is None:
            self._attend_tokens(q_THD, kv, table, rows=rows_R, lengths=lengths_R, options=options, out=out)
            done = len(rows_R)
        else:
            done = self._attend_runs(
                q_THD, kv, table, all_runs=_runs(rows_R, lengths_R, segments), options=options, out=out
            )
        if done < len(out):
            out[done:] = 0
        return out

    def _attend_runs(
        self, q_THD: Tensor, kv: KvLayer, table: Tensor, all_runs: list[Run], options: AttentionOptions, out: Tensor
    ) -> int:
        """Computes the attention of `all_runs`, whose tokens follow each other from token 0 on. Returns the number of
        their tokens."""
        on_matrix_unit = self.library.has("attend_chunk") and q_THD.dtype == torch.bfloat16 and q_THD.shape[2] % 32 == 0
        first = 0
        # Decode rows and short chunks are computed by the same code as decode steps, so they get the same bits as
        # there.
        for short, group in groupby(all_runs, lambda run: run[2] - run[1] < SHORTEST_CHUNK):
            runs = list(group)
            last = first + sum(end - start for _, start, end in runs)
            q, into = q_THD[first:last], out[first:last]
            if short:
                rows, lengths = _tokens(runs)
                self._attend_tokens(q, kv, table, rows=rows, lengths=lengths, options=options, out=into)
            elif on_matrix_unit:
                self._attend_chunks(q, kv, table, runs=runs, options=options, out=into)
            else:
                self._attend_in_lanes(q, kv, table, runs=runs, options=options, out=into)
            first = last
        return first

    def _attend_tokens(
        self,
        q_THD: Tensor,
        kv: KvLayer,
        table: Tensor,
        rows: Tensor,
        lengths: Tensor,
        options: AttentionOptions,
        out: Tensor,
    ) -> None:
        _, heads, size = q_THD.shape
        self.library.call(
            self.threads, "attend", q=q_THD, q_stride=q_THD.stride(0), q_type=TYPES[q_THD.dtype], out=out,
            tokens=len(rows), heads=heads, kv=kv.heads, kv_scales=kv.scales, kv_heads=kv.kv_heads, head_size=size,
            kv_type=TYPES[kv.heads.dtype], table=table, table_stride=table.stride(0), rows=rows, lengths=lengths,
            **_words(options),
        )  # fmt: skip

    def _attend_in_lanes(
        self, q_THD: Tensor, kv: KvLayer, table: Tensor, runs: list[Run], options: AttentionOptions, out: Tensor
    ) -> None:
        _, heads, size = q_THD.shape
        placed, first, states = [], 0, 0
        for row, start, end in runs:
            queries = self._split_queries(start, end, heads // kv.kv_heads, kv.kv_heads, options)
            if 4 * (states + queries) * (2 + size) > MAX_STATE_BYTES:
                queries = 0
            placed.append((row, start, end, first, states if queries else -1))
            first, states = first + end - start, states + queries
        self._scratch.reserve(2 * states * (2 + size))
        # The longest items of the work come first, so that those taken last are short.
        longest_first = torch.tensor(sorted(placed, key=lambda run: -run[2]), dtype=torch.int32)
        self.library.call(
            self.threads, "attend_runs", q=q_THD, q_stride=q_THD.stride(0), q_type=TYPES[q_THD.dtype], out=out,
            heads=heads, kv=kv.heads, kv_scales=kv.scales, kv_heads=kv.kv_heads, head_size=size,
            kv_type=TYPES[kv.heads.dtype], table=table, table_stride=table.stride(0), runs=longest_first,
            count=len(runs), states=self._scratch.data_ptr(), **_words(options),
        )  # fmt: skip

    def _split_queries(self, start: int, end: int, group: int, kv_heads: int, options: AttentionOptions) -> int:
        """The number of states that a run of positions start … end - 1 needs if it is computed split by split: one for
        each query in each split. 0 if it is not."""
        queries = -(-(end - start) * group // QUERIES_OF_BLOCK) * QUERIES_OF_BLOCK
        splits = -(-end // SPLIT_KEYS) - options.first_seen(start) // SPLIT_KEYS
        is_split = queries <= MAX_SPLIT_QUERIES and splits >= LEAST_SPLITS * self.library.allowed(self.threads)
        return queries * kv_heads * splits if is_split else 0

    def _attend_chunks(
        self, q_THD: Tensor, kv: KvLayer, table: Tensor, runs: list[Run], options: AttentionOptions, out: Tensor
    ) -> None:
        _, heads, size = q_THD.shape
        # Memory for the keys and values that one run sees, copied into the order that the matrix unit needs.
        longest = max(
            -(-end // CHUNK_KEYS) * CHUNK_KEYS - options.first_seen(start) // CHUNK_KEYS * CHUNK_KEYS
            for _, start, end in runs
        )
        scratch = torch.empty(2 * kv.kv_heads * size * longest, dtype=torch.bfloat16)
        first = 0
        for row, start, end in runs:
            self.library.call(
                self.threads, "attend_chunk", q=q_THD[first:], q_stride=q_THD.stride(0), out=out[first:], heads=heads,
                kv=kv.heads, kv_scales=kv.scales, kv_heads=kv.kv_heads, head_size=size, kv_type=TYPES[kv.heads.dtype],
                slots=table[row], start=start, end=end, **_words(options), scratch=scratch,
            )  # fmt: skip
            first += end - start

    def layer_norm(self, x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        if x_TH.shape[1] % LANES:
            return reference.layer_norm(x_TH, weight_H, bias_H, eps)
        out = torch.empty_like(x_TH)
        self._layer_norm(x_TH, None, weight_H, bias=bias_H, eps=eps, out=out)
        return out

    def add_layer_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if x_TH.shape[1] % LANES:
            return reference.add_layer_norm(x_TH, residual_TH, weight_H, bias_H, eps)
        self._layer_norm(x_TH, residual_TH, weight_H, bias=bias_H, eps=eps, out=x_TH)
        return x_TH, residual_TH

    def _layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
    ) -> None:
        self._call(
            x.numel(), "layer_norm", x=x, residual=residual, tokens=x.shape[0], width=x.shape[1], type=TYPES[x.dtype],
            weight=weight, bias=bias, eps=eps, out=out,
        )  # fmt: skip

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[1] % LANES:
            return x + y
        self._call(x.numel(), "add", x=x, y=y, tokens=x.shape[0], width=x.shape[1], type=TYPES[x.dtype])
        return x

    def activate(self, x: Tensor, activation: Activation, gated: bool) -> Tensor:
        tokens, width = x.shape[0], x.shape[1] // (2 if gated else 1)
        if width % LANES:
            return reference.activate(x, activation, gated)
        out = torch.empty((tokens, width), dtype=x.dtype)
        self._call(
            out.numel(), "activate", x=x, tokens=tokens, width=width, type=TYPES[x.dtype],
            activation=CONSTANTS[activation.name.upper()], gated=int(gated), out=out,
        )  # fmt: skip
        return out

    def route(self, logits_TE: Tensor, chosen: int, over_chosen: bool) -> Routes:
        tokens, experts = logits_TE.shape
        ids, pairs = (torch.empty(tokens * chosen, dtype=torch.int32) for _ in range(2))
        offsets, scores = torch.empty(experts + 1, dtype=torch.int32), torch.empty(tokens * chosen)
        self._call(
            logits_TE.numel(), "route", logits=logits_TE, stride=logits_TE.stride(0), tokens=tokens, experts=experts,
            chosen=chosen, type=TYPES[logits_TE.dtype], over_chosen=int(over_chosen), ids=ids, scores=scores,
            pairs=pairs, offsets=offsets,
        )  # fmt: skip
        return Routes(scores, pairs, offsets)

    def experts(
        self, x_TH: Tensor, routes: Routes, weights: ExpertWeights, adapted: AdaptedPairs | None = None
    ) -> Tensor:
        gate_up, down = weights.gate_up, weights.down
        if not (isinstance(gate_up, Dense) and isinstance(down, Dense)):
            return reference.experts(x_TH, routes, weights, adapted)
        (tokens, width), (experts, _, inner), pairs = x_TH.shape, down.values.shape, len(routes.pairs_P)
        if width % LANES or inner % LANES:
            return reference.experts(x_TH, routes, weights, adapted)
        opened, parts = torch.empty((pairs, inner), dtype=x_TH.dtype), torch.empty((pairs, width), dtype=x_TH.dtype)
        out = torch.empty_like(x_TH)
        common: dict[str, Argument] = {
            "pairs": routes.pairs_P, "offsets": routes.offsets, "experts": experts,
            "width": width, "inner": inner, "type": TYPES[x_TH.dtype],
        }  # fmt: skip
        work, clamped = pairs * width * inner, weights.clamped
        limit, slope = (None, None) if clamped is None else (clamped.limit, clamped.slope)
        self._call(
            work, "experts_up", x=x_TH, chosen=pairs // tokens, gate_up=gate_up.values, bias=weights.gate_up_bias,
            addend=None if adapted is None else adapted.of_gate_up(x_TH, routes), limit=limit, slope=slope,
            out=opened, **common,
        )  # fmt: skip
        self._call(
            work, "experts_down", x=opened, scores=routes.scores_P, down=down.values, bias=weights.down_bias,
            addend=None if adapted is None else adapted.of_down(opened), out=parts, **common,
        )  # fmt: skip
        self._call(
            parts.numel(), "experts_sum", parts=parts, tokens=tokens, chosen=pairs // tokens, width=width,
            type=TYPES[x_TH.dtype], out=out,
        )  # fmt: skip
        return out

    def experts_of_codes(
        self, experts: Iterable[ExpertCodes], clamped: ClampedGate | None, x_type: torch.dtype
    ) -> ExpertKernel | None:
        if x_type not in (torch.float32, torch.bfloat16):
            return None
        are_ints = self._activations is ActivationType.int8
        make = partial(self._by_ints if are_ints else self._by_codes, x_type=x_type, y_type=x_type)
        found = []
        for expert in experts:
            if (linears := linears_of(expert, make)) is None:
                return None
            found.append(linears)
            self.has_int_experts = are_ints
        products = partial(ExpertProducts, self.library, self.threads, self._scratch)
        ups, downs = (products(each) for each in zip(*found, strict=True))
        return None if downs.columns % LANES else ExpertsOfCodes(self.library, self.threads, ups, downs, clamped)

    def add_scored(
        self, x_TH: Tensor, y_TH: Tensor, inputs_TH: Tensor, weight_H: Tensor, addend: Tensor | None = None
    ) -> Tensor:
        tokens, width = x_TH.shape
        if width % LANES:
            return reference.add_scored(x_TH, y_TH, inputs_TH, weight_H, addend)
        self._call(
            x_TH.numel(), "add_scored", x=x_TH, y=y_TH, inputs=inputs_TH, weight=weight_H, tokens=tokens, width=width,
            type=TYPES[x_TH.dtype], addend=addend, addend_stride=0 if addend is None else addend.stride(0),
        )  # fmt: skip
        return x_TH

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % LANES:
            return reference.silu_mul(gate_up)
        out = torch.empty((tokens, width), dtype=gate_up.dtype)
        self._call(out.numel(), "silu_mul", gate_up=gate_up, tokens=tokens, width=width, type=TYPES[out.dtype], out=out)
        return out

    def sorts(self) -> bool:
        return False

    def sample(self, logits_RV: Tensor, choices: Choices) -> Chosen:
        rows, vocabulary = logits_RV.shape
        finite, changes = torch.empty(rows, dtype=torch.bool), _changes_in_torch(choices)
        if changes:
            self._call(
                logits_RV.numel(), "check_finite", logits=logits_RV, count=rows, vocabulary=vocabulary,
                stride=logits_RV.stride(0), finite=finite,
            )  # fmt: skip
            reference.change(logits_RV, choices)
        ids, logprobs = torch.empty(rows, dtype=torch.int32), torch.empty(rows)
        words = self.library.allowed(self.threads) * (CUT_BUCKETS + 3 * vocabulary + 16)
        if (choices.any_cuts or choices.masks is not None) and len(self._cut_scratch) < words:
            self._cut_scratch = torch.empty(words, dtype=torch.int64)
        self._call(
            logits_RV.numel(), "draw", logits=logits_RV, count=rows, vocabulary=vocabulary, stride=logits_RV.stride(0),
            draws=choices.draws_R, seeds=choices.seeds_R, lengths=choices.lengths, rows=choices.rows_R,
            temperatures=choices.temperature_R, top_k=choices.top_k_R, top_p=choices.top_p_R,
            log_min_p=choices.log_min_p_R, typical_p=choices.typical_p_R, **_mask_words(choices.masks, vocabulary),
            is_checked=int(changes), finite=finite, ids=ids, logprobs=logprobs, scratch=self._cut_scratch,
        )  # fmt: skip
        return Chosen(ids, logprobs, finite)

    vocabulary_part = staticmethod(reference.vocabulary_part)
    splits_draws = staticmethod(reference.splits_draws)
    reduce_part = staticmethod(reference.reduce_part)
    merge_parts = staticmethod(reference.merge_parts)

    def place(
        self, rows_R: Tensor, slots_R: Tensor, history: Tensor, table: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = torch.empty((3, len(rows_R)), dtype=torch.int32)
        ids, positions, row_lengths = out
        self._call(
            len(rows_R), "place", rows=rows_R, slots=slots_R, count=len(rows_R), history=history, table=table,
            stride=table.stride(0), lengths=lengths, ids=ids, positions=positions, row_lengths=row_lengths,
        )  # fmt: skip
        return ids, positions, row_lengths

    def advance(self, history: Tensor, lengths: Tensor, rows_R: Tensor, ids_R: Tensor) -> None:
        self._call(
            len(ids_R), "advance", history=history, stride=history.stride(0), lengths=lengths, rows=rows_R, ids=ids_R,
            count=len(ids_R),
        )  # fmt: skip

    def _call(self, numbers: int, kernel: str, /, **arguments: Argument) -> None:
        """Calls a kernel that computes `numbers` numbers: on all threads, or on one if the numbers are few."""
        self.library.call(self.threads if numbers > WORTH_THREADS else 1, kernel, **arguments)


def _runs(rows_R: Tensor, lengths_R: Tensor, segments: Segments) -> list[Run]:
    """(row, first position, position after the last) of each decode row and of each run."""
    rows = zip(rows_R.tolist(), lengths_R.tolist(), strict=True)
    decoding = [(row, length - 1, length) for row, length in rows if length]
    return decoding + [(row, start, end) for _, row, start, end in segments.runs()]


def _tokens(runs: list[Run]) -> tuple[Tensor, Tensor]:
    """For every token: its row, and the number of positions that it attends to; int32."""
    rows = [torch.full((end - start,), row, dtype=torch.int32) for row, start, end in runs]
    lengths = [torch.arange(start + 1, end + 1, dtype=torch.int32) for _, start, end in runs]
    return torch.cat(rows), torch.cat(lengths)


def _words(options: AttentionOptions) -> dict[str, Argument]:
    return {
        "scale": options.scale, "softcap": options.softcap, "slopes": options.slopes_H, "sinks": options.sinks_H,
        "window": options.window,
    }  # fmt: skip


def _norm_words(norms: HeadNorms | None) -> dict[str, Argument]:
    if norms is None:
        return NO_NORMS
    of_type = {"norm_type": TYPES[norms.query_D.dtype], "eps": norms.eps}
    return {"query_norm": norms.query_D, "key_norm": norms.key_D, **of_type}


def _changes_in_torch(choices: Choices) -> bool:
    """Whether logits are changed before the C code gets them. It applies masks itself."""
    listed = choices.bias, choices.allowed, choices.bans
    return choices.any_penalties or any(one is not None for one in listed)


def _mask_words(masks: Masks | None, vocabulary: int) -> dict[str, Argument]:
    if masks is None:
        return NO_MASKS
    words = masks.bits_MW
    assert words.stride(1) == 1 and words.shape[1] * WORD_BITS >= vocabulary and len(words) == len(masks.rows_M)
    return {"masks": words, "mask_stride": words.stride(0), "masked_rows": masks.rows_M, "masked": len(words)}


def _fits(head_size: int) -> bool:
    return head_size % LANES == 0 and head_size <= MAX_HEAD_SIZE
