"""Rows and batches: which request has which row, and which steps are refused before anything has changed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from text_generation_common.sampling import Sampling
from text_generation_server.errors import StepError
from text_generation_server.step.layout import MAX_CHUNKS, DecodeInputs, MixedInputs, lay_out
from text_generation_server.step.preparation import Planner, StepLimits
from text_generation_server.step.rows import WIDTH_STEP, Batches, PromptChunk, Rows, StepBatch

CPU = torch.device("cpu")
NO_SLOTS = torch.empty(0, dtype=torch.int32)
VOCABULARY, SLOTS, LENGTH, PADDING_SLOT = 50, 100, 8, 99


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def chunk(
    request_id: int, ids: list[int], slots: list[int] | None = None, start: int = 0, end: int | None = None,
    prompt: int | None = None,
) -> PromptChunk:  # fmt: skip
    end = len(ids) if end is None else end
    given = int32(*(range(10, 10 + len(ids)) if slots is None else slots))
    parameters = Sampling(seed=request_id)
    return PromptChunk(
        request_id, start, end, end == len(ids), int32(*ids), given, len(ids) if prompt is None else prompt, parameters
    )


def make_rows(count: int = 3) -> Rows:
    return Rows(count, LENGTH, CPU, PADDING_SLOT)


def make_planner(count: int = 3) -> Planner:
    return Planner(Batches(make_rows(count)), StepLimits(VOCABULARY, SLOTS))


def state(rows: Rows) -> tuple[object, ...]:
    """The whole state of the rows that a step may change."""
    return (
        len(rows),
        rows.changes,
        rows.known.tolist(),
        rows.lengths.tolist(),
        rows.table.tolist(),
        rows.history.tolist(),
    )


def test_a_row_holds_what_its_request_came_with() -> None:
    rows = make_rows()
    row = rows.join(chunk(7, [3, 4, 5], [20, 30, 40], prompt=2))
    assert rows.row(7) == row and len(rows) == 1
    assert rows.history[row, :3].tolist() == [3, 4, 5] and rows.table[row, :3].tolist() == [20, 30, 40]
    assert rows.lengths[row] == rows.known[row] == 3
    assert rows.parameters.of_row[row].seed == 7 and rows.parameters.prompt_length[row] == 2


def test_the_padding_row_is_one_token_in_its_own_slot_whatever_requests_join() -> None:
    rows = make_rows()
    for request_id in range(3):
        assert rows.join(chunk(request_id, [3] * LENGTH)) != rows.padding
    assert rows.table.shape == rows.history.shape == (rows.count + 1, WIDTH_STEP)
    assert rows.padding == rows.count == 3 and rows.length == LENGTH and rows.device == CPU
    assert rows.table[rows.padding, 0] == PADDING_SLOT and rows.lengths[rows.padding] == 1
    assert Rows(1, LENGTH, CPU).table[1, 0] == 0


@pytest.mark.parametrize(("length", "width"), [(1, 128), (128, 128), (129, 256)])
def test_the_width_of_the_tensors_hides_how_long_the_longest_history_is(length: int, width: int) -> None:
    rows = Rows(2, length, CPU)
    assert rows.length == length and rows.table.shape == rows.history.shape == (3, width)


def test_rows_are_handed_out_from_the_first_and_used_again() -> None:
    rows = make_rows()
    assert [rows.join(chunk(i, [3])) for i in range(3)] == [0, 1, 2]
    rows.leave(1)
    assert rows.join(chunk(8, [4])) == 1 and len(rows) == 3
    rows.clear()
    assert len(rows) == 0 and sorted(rows.join(chunk(i, [3])) for i in range(3)) == [0, 1, 2]


def test_a_request_that_joins_or_leaves_changes_the_count() -> None:
    rows = make_rows()
    seen = {rows.changes}
    for change in (
        lambda: rows.join(chunk(1, [3])),
        lambda: rows.join(chunk(2, [3])),
        lambda: rows.leave(1),
        rows.clear,
    ):
        change()
        assert rows.changes not in seen
        seen.add(rows.changes)


def test_tokens_are_counted_for_the_rows_that_got_one() -> None:
    rows = make_rows()
    for i in range(3):
        rows.join(chunk(i, [3, 4]))
    rows.note_tokens([0, 2])
    rows.note_tokens([2])
    assert rows.known.tolist() == [3, 2, 4]


def test_a_request_that_is_not_here_is_named() -> None:
    with pytest.raises(StepError, match="request 9 is not in this shard"):
        make_rows().row(9)


INCOMPLETE = [
    PromptChunk(5, 0, 1, True, None, int32(1), 1, Sampling()),
    PromptChunk(5, 0, 1, True, int32(1), None, 1, Sampling()),
    PromptChunk(5, 0, 1, True, int32(1), int32(1), 1, None),
    PromptChunk(5, 0, 1, True, int32(1), int32(1), sampling=Sampling()),
    chunk(5, [3, 4], [1]),
    chunk(5, [3, 4], [1, 2, 3]),
    chunk(5, [3, 4], prompt=0),
    chunk(5, [3, 4], prompt=3),
    chunk(5, [3] * (LENGTH + 1)),
    chunk(1, [3]),  # wrong: the request has a row already
]


@pytest.mark.parametrize("bad", INCOMPLETE)
def test_a_chunk_that_cannot_join_is_refused_by_its_request_s_name_and_changes_nothing(bad: PromptChunk) -> None:
    rows = make_rows()
    rows.join(chunk(1, [3, 4]))
    before = state(rows)
    with pytest.raises(StepError, match=f"request {bad.request_id}"):
        rows.join(bad)
    assert state(rows) == before


def test_a_chunk_that_just_fits_joins() -> None:
    rows = make_rows()
    assert rows.known[rows.join(chunk(1, [3] * LENGTH))] == LENGTH
    assert rows.parameters.prompt_length[rows.join(chunk(2, [3, 4], prompt=1))] == 1


def test_there_are_as_many_rows_as_were_asked_for() -> None:
    rows = make_rows(2)
    rows.join(chunk(1, [3]))
    rows.join(chunk(2, [3]))
    with pytest.raises(StepError, match="request 3"):
        rows.join(chunk(3, [3]))


def make_batches() -> Batches:
    """A set of batches: requests 1 and 2 in batch 1, request 3 in batch 2."""
    batches = Batches(make_rows())
    for batch_id, ids in ((1, [1, 2]), (2, [3])):
        for request_id in ids:
            batches.rows.join(chunk(request_id, [3]))
        batches.join(batch_id, set(ids))
    return batches


def test_a_step_may_carry_some_requests_of_a_batch_and_no_others() -> None:
    batches = make_batches()
    assert batches.take(1, [2]) is batches.take(1, [])
    for batch_id, ids in ((1, [3]), (1, [1, 3]), (9, []), (2, [1])):
        with pytest.raises(StepError, match=f"batch {batch_id} "):
            batches.take(batch_id, ids)


def test_merged_batches_are_one_under_the_first_ones_id() -> None:
    batches = make_batches()
    changes = batches.rows.changes
    merged = batches.merge([2, 1])
    assert (merged.id, merged.request_ids) == (2, {1, 2, 3}) and batches.take(2, [1, 2, 3]) is merged
    assert batches.rows.changes > changes and len(batches.rows) == 3
    with pytest.raises(StepError, match="batch 1 "):
        batches.take(1, [])


def test_a_filter_keeps_the_requests_it_names_and_frees_the_other_rows() -> None:
    batches = make_batches()
    kept = batches.filter(1, [2])
    assert kept.request_ids == {2} and batches.take(1, [2]) is kept and len(batches.rows) == 2
    for ids in ([], [1], [2, 3]):
        with pytest.raises(StepError, match="batch 1"):
            batches.filter(1, ids)
    assert kept.request_ids == {2} and len(batches.rows) == 2


def test_clearing_frees_one_batch_or_all_and_accepts_an_unknown_id() -> None:
    batches = make_batches()
    batches.clear(9)
    assert len(batches.rows) == 3
    batches.clear(1)
    assert len(batches.rows) == 1 and batches.rows.row(3) == 2
    with pytest.raises(StepError, match="batch 1 "):
        batches.take(1, [])
    batches.clear(None)
    assert len(batches.rows) == 0
    with pytest.raises(StepError, match="batch 2 "):
        batches.take(2, [])


def test_a_step_is_its_decoding_rows_then_its_chunks_and_samples_those_that_are_done() -> None:
    planner = make_planner()
    first = planner.prepare([], NO_SLOTS, 4, [chunk(1, [3, 4], [20, 21]), chunk(2, [5, 6, 7], [30, 31, 32], end=2)])
    assert (first.batch.id, first.batch.request_ids) == (4, {1, 2})
    assert [(c.row, c.start, c.end, c.last) for c in first.chunks] == [(0, 0, 2, True), (1, 0, 2, False)]
    assert (first.decode.request_ids, first.sampled.request_ids, first.sampled.rows) == ([], [1], (0,))
    then = planner.prepare([StepBatch(4, [1])], int32(40), 9, [PromptChunk(2, 2, 3, True)])
    assert then.batch is first.batch and then.slots_R.tolist() == [40]
    assert (then.decode.request_ids, then.decode.rows, then.decode.rows_R.tolist()) == ([1], (0,), [0])
    assert (then.sampled.request_ids, then.sampled.rows, then.sampled.rows_R.tolist()) == ([1, 2], (0, 1), [0, 1])
    assert [(c.row, c.start, c.end, c.last) for c in then.chunks] == [(1, 2, 3, True)]
    both = planner.prepare([StepBatch(4, [2, 1])], int32(41, 42), 9, [])
    assert both.sampled is both.decode and both.decode.rows == (1, 0)


def test_batches_of_one_step_become_one_batch() -> None:
    planner = make_planner()
    planner.prepare([], NO_SLOTS, 4, [chunk(1, [3])])
    planner.prepare([], NO_SLOTS, 5, [chunk(2, [3])])
    step = planner.prepare([StepBatch(5, [2]), StepBatch(4, [1])], int32(40, 41), 9, [chunk(3, [3])])
    assert (step.batch.id, step.batch.request_ids) == (5, {1, 2, 3})
    assert step.decode.rows == (1, 0) and step.sampled.rows == (1, 0, 2)


def test_the_same_members_are_one_value_until_a_row_gets_another_request() -> None:
    planner = make_planner()
    planner.prepare([], NO_SLOTS, 4, [chunk(1, [3]), chunk(2, [3]), chunk(3, [3])])
    decode = [StepBatch(4, [1, 2])]
    members = planner.prepare(decode, int32(40, 41), 9, []).decode
    assert planner.prepare([StepBatch(4, [1, 2])], int32(42, 43), 9, []).decode is members
    assert planner.prepare([StepBatch(4, [2, 1])], int32(44, 45), 9, []).decode.rows == (1, 0)
    planner.prepare(decode, int32(42, 43), 9, [])
    rows = planner._batches.rows
    for request_id in (1, 2):
        rows.leave(request_id)
    for request_id in (1, 2):
        rows.join(chunk(request_id, [3]))
    assert planner.prepare(decode, int32(46, 47), 9, []).decode.rows == (1, 0)


def ready(known: int) -> Planner:
    """A planner with requests 1 and 2 in batch 4, each with `known` tokens."""
    planner = make_planner()
    planner.prepare([], NO_SLOTS, 4, [chunk(1, [3] * known), chunk(2, [3])])
    return planner


BIASED = Sampling(logit_bias=((VOCABULARY, 1.0),))
BAD_STEPS = {
    "nothing": ([], [], [], "at least one row or chunk"),
    "too few slots": ([1, 2], [40], [], "2 rows came with 1 slots"),
    "too many slots": ([], [40], [chunk(3, [3])], "0 rows came with 1 slots"),
    "a negative slot": ([1], [-1], [], f"one of the {SLOTS}"),
    "a slot past the end": ([1], [SLOTS], [], f"one of the {SLOTS}"),
    "a request twice": ([1, 1], [40, 41], [], "twice"),
    "a stranger": ([1, 9], [40, 41], [], "batch 4 "),
    "an unknown id": ([], [], [chunk(3, [3, VOCABULARY])], f"one of the {VOCABULARY}"),
    "a negative id": ([], [], [chunk(3, [3, -1])], f"one of the {VOCABULARY}"),
    "a chunk's slot": ([], [], [chunk(3, [3, 4], [SLOTS, 1])], f"one of the {SLOTS}"),
    "a chunk of nothing": ([], [], [chunk(3, [3, 4], start=1, end=1)], "no chunk 1:1"),
    "a chunk before the start": ([], [], [chunk(3, [3, 4], start=-1)], "no chunk -1:2"),
    "a chunk past the end": ([], [], [chunk(3, [3, 4], end=3)], "no chunk 0:3"),
    "a later chunk past the end": ([], [], [PromptChunk(2, 1, 2, True)], "1 tokens have no chunk 1:2"),
    "a bias of no token": ([], [], [replace(chunk(3, [3]), sampling=BIASED)], f"one of the {VOCABULARY}"),
    "a last chunk without room": ([], [], [chunk(3, [3] * LENGTH)], f"after {LENGTH} of {LENGTH}"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_step_that_does_not_fit_is_refused_before_anything_has_changed(name: str) -> None:
    decoding, slots, chunks, message = BAD_STEPS[name]
    planner = ready(2)
    before = state(planner._batches.rows)
    with pytest.raises(StepError, match=message):
        planner.prepare([StepBatch(4, decoding)] if decoding else [], int32(*slots), 9, chunks)
    assert state(planner._batches.rows) == before


def test_a_row_that_is_full_is_refused_by_its_requests_name() -> None:
    planner = ready(LENGTH - 1)
    planner._batches.rows.note_tokens([0])
    with pytest.raises(StepError, match=f"request 1: no room for another token after {LENGTH} of {LENGTH}"):
        planner.prepare([StepBatch(4, [2, 1])], int32(40, 41), 9, [])
    planner.prepare([StepBatch(4, [2])], int32(40), 9, [])


def test_the_last_slot_and_the_last_id_and_the_last_place_are_taken() -> None:
    planner = ready(LENGTH - 1)
    planner.prepare([StepBatch(4, [1])], int32(SLOTS - 1), 9, [chunk(3, [0, VOCABULARY - 1], [0, SLOTS - 1])])
    full = make_planner()
    # Wrong: the row has no place for the last chunk.
    full.prepare([], NO_SLOTS, 4, [chunk(1, [3] * LENGTH, end=LENGTH - 1)])
    assert full._batches.rows.known[0] == LENGTH


class Placing:
    """Kernels of which only `place` works."""

    def place(
        self, rows_R: torch.Tensor, slots_R: torch.Tensor, history: torch.Tensor, table: torch.Tensor,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        from text_generation_server.kernels import reference

        return reference.place(rows_R, slots_R, history, table, lengths)


def test_a_mixed_step_is_laid_out_as_decode_rows_chunks_and_padding() -> None:
    planner, kernels = make_planner(), Placing()
    planner.prepare([], NO_SLOTS, 4, [chunk(1, [3, 4], [20, 21]), chunk(2, [5, 6, 7, 8], [30, 31, 32, 33], end=1)])
    rows = planner._batches.rows
    rows.history[0, 2], rows.lengths[0] = 9, 3  # as a step does: appends the row's new token
    rows.note_tokens([0])
    more = [PromptChunk(2, 1, 3, False), chunk(3, [11, 12], [50, 51])]
    step = planner.prepare([StepBatch(4, [1])], int32(40), 9, more)
    mixed = lay_out(step, rows, kernels, min_tokens=7)  # type: ignore[arg-type]
    given = mixed.input
    assert given.ids_T.tolist() == [9, 6, 7, 11, 12, 0, 0]
    assert given.positions_T.tolist() == [2, 1, 2, 0, 1, 0, 0] and given.positions_T.dtype == torch.int32
    assert given.slots_T.tolist() == [40, 31, 32, 50, 51, PADDING_SLOT, PADDING_SLOT]
    assert given.segments is not None and list(given.segments.runs()) == [(1, 1, 1, 3), (3, 2, 0, 2)]
    assert given.segments.rows_C.tolist() == [1, 2] and given.segments.starts_C.tolist() == [1, 0]
    assert given.segments.offsets.tolist() == [1, 3, 5] and given.segments.tokens == 4
    assert given.rows_R.tolist() == [0] and given.lengths_R.tolist() == [3] and given.table is rows.table
    assert mixed.sampled_tokens.tolist() == [0, 4, 0, 0, 0, 0, 0] and mixed.sampled_rows_R.tolist() == [0, 2]


def test_recorded_mixed_steps_read_the_same_numbers_at_the_same_addresses_then_padding() -> None:
    planner, kernels = make_planner(), Placing()
    planner.prepare([], NO_SLOTS, 4, [chunk(1, [3, 4], [20, 21]), chunk(2, [5, 6, 7, 8], [30, 31, 32, 33], end=1)])
    rows = planner._batches.rows
    rows.lengths[0] = 3
    rows.note_tokens([0])
    inputs, addresses = MixedInputs(8, rows, PADDING_SLOT), set()
    steps = [([StepBatch(4, [1])], int32(40), [PromptChunk(2, 1, 3, False), chunk(3, [11, 12], [50, 51])])]
    steps.append(([], NO_SLOTS, [PromptChunk(2, 3, 4, True)]))
    for decoding, slots, chunks in steps:
        step = planner.prepare(decoding, slots, 4, chunks)
        inputs.fill(step, min_tokens=1)
        given = inputs.step_input(kernels, 8)  # type: ignore[arg-type]
        mixed = lay_out(step, rows, kernels, min_tokens=8)  # type: ignore[arg-type]
        for name in ("ids_T", "positions_T", "slots_T"):
            assert torch.equal(getattr(given, name), getattr(mixed.input, name))
        count = len(step.decode.rows)
        assert given.rows_R.tolist() == [*step.decode.rows, *[rows.padding] * (8 - count)]
        assert given.lengths_R.tolist() == [3] * count + [0] * (8 - count)
        assert given.segments is not None and mixed.input.segments is not None
        assert list(given.segments.runs()) == list(mixed.input.segments.runs())
        assert len(given.segments.rows_C) == MAX_CHUNKS and given.segments.tokens == 8
        tokens, sampled_rows = inputs.sampled(len(step.sampled.rows), 1)
        assert tokens.tolist() == mixed.sampled_tokens[: len(tokens)].tolist()
        assert torch.equal(sampled_rows, mixed.sampled_rows_R)
        addresses.add((given.rows_R.data_ptr(), given.segments.offsets.data_ptr(), tokens.data_ptr()))
    assert len(addresses) == 1
    inputs.fill(None, min_tokens=1)
    given = inputs.step_input(kernels, 8)  # type: ignore[arg-type]
    assert given.segments is not None and not list(given.segments.runs())
    assert given.lengths_R.tolist() == [0] * 8 and given.slots_T.tolist() == [PADDING_SLOT] * 8


def test_a_mixed_step_that_is_large_enough_gets_no_padding() -> None:
    planner = make_planner()
    step = planner.prepare([], NO_SLOTS, 4, [chunk(1, [3, 4, 5])])
    for least in (0, 3):
        mixed = lay_out(step, planner._batches.rows, Placing(), min_tokens=least)  # type: ignore[arg-type]
        assert mixed.input.ids_T.tolist() == [3, 4, 5]
    assert mixed.sampled_tokens.tolist() == [2, 0, 0]


def test_decode_inputs_are_the_rows_then_padding() -> None:
    rows = make_rows()
    for i in range(2):
        rows.join(chunk(i, [3, 4 + i], [20 + 2 * i, 21 + 2 * i]))
    inputs = DecodeInputs(3, rows, PADDING_SLOT)
    for size in (4, 3):  # the rows of an earlier, larger step must not remain
        inputs.fill(np.array([1, 0], dtype=np.int32), np.array([61, 60], dtype=np.int32), size)
        given = inputs.step_input(Placing(), size, tokens=5)  # type: ignore[arg-type]
        assert given.rows_R.tolist() == [1, 0] + [rows.padding] * (size - 2)
        assert given.ids_T.tolist() == [5, 4, 0, 0, 0] and given.positions_T.tolist() == [1, 1, 0, 0, 0]
        assert given.slots_T.tolist() == [61, 60] + [PADDING_SLOT] * 3
        assert given.lengths_R.tolist() == [2, 2] + [1] * (size - 2) and given.segments is None
        assert rows.table[:2, 1].tolist() == [60, 61] and inputs.rows_R(2).tolist() == [1, 0]
    assert inputs.step_input(Placing(), 2, tokens=0).ids_T.tolist() == [5, 4]  # type: ignore[arg-type]
