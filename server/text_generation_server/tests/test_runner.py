"""Errors, results and measured times of steps on one shard."""

import errno
import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from shard_tools import (
    BATCH,
    Client,
    fresh_client,
    generate,
    make_checkpoint,
    make_runner,
    random_ids,
    scattered_slots,
    warm_runner,
)

from text_generation_common import faults
from text_generation_common.errors import NO_TOKEN, NOT_FINITE, MemoryLimitError
from text_generation_common.sampling import NAMES, NEUTRAL, Sampling
from text_generation_server.device.kept import KeptMemory
from text_generation_server.errors import StepError
from text_generation_server.kernels import reference
from text_generation_server.kernels.interface import Choices, Chosen, Kernels
from text_generation_server.runner import Capacity, ModelRunner
from text_generation_server.step import rows as rows_of_step
from text_generation_server.step.results import StepOutput
from text_generation_server.step.rows import PromptChunk, StepBatch
from text_generation_server.step.warmup import EVERY_OPTION, LongestPause

POISON = 301  # a token that no request here generates; its embedding is NaN
NEW = 6


@pytest.fixture(scope="module")
def runner(model: Path) -> ModelRunner:
    return warm_runner(model)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, path / "model.safetensors")
    return warm_runner(path)


def without_poison(length: int, seed: int) -> torch.Tensor:
    ids = random_ids(length, seed)
    return ids.masked_fill(ids == POISON, 5)


def crowd(runner: ModelRunner, prompts: dict[int, torch.Tensor], choices: dict[int, Sampling]) -> list[StepOutput]:
    client = fresh_client(runner)
    chunks = [client.first_chunk(i, ids, parameters=choices[i]) for i, ids in prompts.items()]
    outputs = [client.step([], chunks)]
    return outputs + [client.step(list(prompts)) for _ in range(NEW - 1)]


def said_by(outputs: list[StepOutput], request_id: int) -> list[tuple[int, float]]:
    index = [output.request_ids.index(request_id) for output in outputs]
    return [(int(o.token_ids[i]), float(o.logprobs[i])) for o, i in zip(outputs, index, strict=True)]


def test_a_poisoned_request_is_named_and_its_neighbours_do_not_change_by_a_bit(poisoned: ModelRunner) -> None:
    options = [Sampling(), Sampling(do_sample=True, seed=3, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.5)]
    prompts = {i: without_poison(5 + 20 * i, i) for i in range(8)}
    choices = {i: options[i % 2] for i in prompts}
    healthy = crowd(poisoned, prompts, choices)
    assert all(output.failures == {} for output in healthy)
    prompts[3] = prompts[3].clone()
    prompts[3][10] = POISON
    sick = crowd(poisoned, prompts, choices)
    assert all(output.failures == {3: NOT_FINITE} for output in sick)
    for i in prompts:
        assert (said_by(sick, i) == said_by(healthy, i)) == (i != 3)
    assert all(bool(output.logprobs.isfinite().all()) for output in sick)


def test_a_request_without_a_token_that_could_come_next_fails_for_this_reason_alone(runner: ModelRunner) -> None:
    runner.warmup(64, None, 16, None)
    nothing = Sampling(allowed_token_ids=(9,), bad_words_ids=((9,),))
    prompts = {i: random_ids(5 + i, i) for i in range(4)}
    free = dict.fromkeys(prompts, Sampling())
    healthy, sick = crowd(runner, prompts, free), crowd(runner, prompts, free | {2: nothing})
    assert all(output.failures == {2: NO_TOKEN} for output in sick)
    assert all(said_by(sick, i) == said_by(healthy, i) for i in (0, 1, 3))


def test_slots_that_held_not_a_number_do_no_harm_to_their_next_owner(poisoned: ModelRunner) -> None:
    healthy = generate(poisoned, without_poison(70, 1), NEW)
    client = fresh_client(poisoned)
    slots = client.slots
    ids = without_poison(90, 2)
    ids[0] = POISON
    assert client.step([], [client.first_chunk(7, ids)]).failures == {7: NOT_FINITE}
    client.step([7])
    poisoned.clear(None)
    again = Client(poisoned, slots)
    again.step([], [again.first_chunk(7, without_poison(70, 1))])
    for _ in range(NEW - 1):
        again.step([7])
    assert (again.tokens, again.logprobs) == (healthy.tokens, healthy.logprobs)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_logit_of_a_row_is_enough_and_large_ones_are_fine(runner: ModelRunner, value: float) -> None:
    client = fresh_client(runner)
    client.step([], [client.first_chunk(i, random_ids(4, i)) for i in range(3)])
    logits = torch.randn(3, 320)
    logits[1] *= 1e38 / logits[1].abs().max()  # The sum of these logits may overflow, but each logit is finite.
    logits[2, 17] = value
    with torch.inference_mode():
        rows = runner.row_state.batches.rows
        sampled = runner._sampler(logits, rows, tuple(rows.row(i) for i in range(3)))
    assert sampled.finite_R.tolist() == [True, True, False] and bool(sampled.logprobs_R.isfinite().all())


def broken_chunks(client: Client) -> dict[str, tuple[Any, str]]:
    good = client.first_chunk(9, random_ids(20))
    return {
        "id": (replace(good, ids=good.ids + 320), "not one of the 320 of the vocabulary"),
        "negative id": (replace(good, ids=good.ids - 400), "not one of the 320 of the vocabulary"),
        "slot": (replace(good, slots=good.slots + 2**20), "a slot is not one of the"),
        "range": (replace(good, end=21), "20 tokens have no chunk 0:21"),
        "empty": (replace(good, start=20), "have no chunk 20:20"),
        "no row": (replace(good, ids=None, slots=None, sampling=None), "request 9 is not in this shard"),
    }


@pytest.mark.parametrize("broken", ["id", "negative id", "slot", "range", "empty", "no row"])
def test_a_chunk_that_does_not_fit_is_refused_before_anything_changes(runner: ModelRunner, broken: str) -> None:
    whole = generate(runner, random_ids(20), NEW)
    client = fresh_client(runner)
    client.step([], [client.first_chunk(7, random_ids(20))])
    chunk, reason = broken_chunks(client)[broken]
    with pytest.raises(StepError, match=reason):
        runner.step([StepBatch(BATCH, [7])], client.take(1), BATCH, [chunk])
    for _ in range(NEW - 1):
        client.step([7])
    assert client.tokens == whole.tokens


def test_a_row_is_filled_to_its_last_token_and_no_further(runner: ModelRunner) -> None:
    client = generate(runner, random_ids(510), 2)
    assert len(client.tokens[7]) == 2
    with pytest.raises(StepError, match="request 7: no room for another token after 512 of 512"):
        client.step([7])
    with pytest.raises(StepError, match="a slot that is not one of the"):
        runner.step([StepBatch(BATCH, [7])], torch.tensor([2**20], dtype=torch.int32), BATCH, [])


def test_a_step_gives_a_sign_of_life_after_every_layer_the_logits_and_the_sampling(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    signs: list[None] = []
    runner = make_runner(tmp_path, on_progress=lambda: signs.append(None))
    assert runner.longest_pause_s == 0.0
    runner.warmup(64, None, 4, None)
    # The expected reports come from three small steps, two of them with log-probabilities of a prompt, and the largest
    # step, all of one layer, as all layers are alike; a decode step of three layers, and the caches of one layer and of
    # three.
    assert runner.longest_pause_s > 0.0 and len(signs) == 4 * (1 + 2) + 2 + 3 + 1 + 3
    signs.clear()
    client = Client(runner, scattered_slots(runner))
    client.step([], [client.first_chunk(7, random_ids(5))])
    assert len(signs) == 3 + 2


def test_a_fault_of_a_step_strikes_after_its_first_layer(model: Path) -> None:
    signs: list[None] = []
    runner = make_runner(model, on_progress=lambda: signs.append(None))
    runner.warmup(64, None, 4, None)
    signs.clear()
    faults.setup("shard.prefill:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            generate(runner, random_ids(5), 1)
    finally:
        faults.setup("")
    assert len(signs) == 1


def test_where_memory_is_short_the_models_limit_gives_way_and_the_users_does_not(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(model)
    slots = 100
    per_slot = runner._model.bytes_per_slot(torch.float32)
    monkeypatch.setattr("text_generation_server.runner.available_bytes", lambda *_: slots * per_slot)
    assert runner.warmup(64, None, 4, None) == Capacity(slots, slots)
    assert runner.warmup(64, slots, 4, None) == Capacity(slots, slots)
    with pytest.raises(MemoryLimitError, match=f"`max_total_tokens={slots + 1}` needs"):
        runner.warmup(64, slots + 1, 4, None)


def test_what_a_model_keeps_for_its_rows_leaves_less_memory_for_slots(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, slots, rows = make_runner(model), 100, 4
    per_slot = runner._model.bytes_per_slot(torch.float32)
    monkeypatch.setattr("text_generation_server.runner.available_bytes", lambda *_: slots * per_slot)
    monkeypatch.setattr(runner._model, "bytes_per_row", 10 * per_slot)
    assert runner.warmup(64, None, rows, None).slots == slots - 10 * rows


@pytest.mark.parametrize("wanted", [None, 1 << 20])
def test_memory_that_the_system_refuses_is_told_with_what_would_fit(
    model: Path, monkeypatch: pytest.MonkeyPatch, wanted: int | None
) -> None:
    runner, asked = make_runner(model), mmap.mmap

    def refusing(number: int, length: int, **more: Any) -> mmap.mmap:
        if length > 1 << 21:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return asked(number, length, **more)

    monkeypatch.setattr(mmap, "mmap", refusing)
    monkeypatch.setattr("text_generation_server.runner.available_bytes", lambda *_: 1 << 40)
    with pytest.raises(MemoryLimitError, match=r"need \d+ MiB, .* limit is \d+ MiB: try --max-batch-total-tokens \d+"):
        runner.warmup(64, None, 1 << 14, wanted)


def test_fewer_rows_than_requests_leave_the_slots_of_all_requests(model: Path) -> None:
    runner = make_runner(model)
    all_rows = runner.warmup(64, 100, 4, None)
    assert runner.row_state.batches.rows.count == 4
    assert runner.warmup(64, 100, 4, None, max_rows=2) == all_rows
    assert runner.row_state.batches.rows.count == 2
    runner.warmup(64, 100, 4, None, max_rows=8)
    assert runner.row_state.batches.rows.count == 4


def test_the_longest_pause_is_the_longest_one() -> None:
    times = iter([10.0, 10.5, 13.0, 13.25])
    passed_on: list[None] = []
    pauses = LongestPause(lambda: passed_on.append(None), lambda: next(times))
    for _ in range(3):
        pauses()
    assert pauses.seconds == 2.5 and len(passed_on) == 3


class Noting:
    """Kernels that note the name of each kernel that is called."""

    def __init__(self, kernels: Kernels) -> None:
        self.called: list[str] = []
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.called.append(name)
            return getattr(self._kernels, name)(*arguments, **options)

        return call


def test_pauses_are_measured_when_all_kernels_have_run_before(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's first call may compile it, which takes seconds. The launcher waits for ten pauses before it calls a
    shard hung."""
    kernels = Noting(cast(Kernels, reference))
    called_before: list[str] = []

    class NotedPause(LongestPause):
        def __init__(self, on_progress: Callable[[], None]) -> None:
            super().__init__(on_progress)
            called_before.extend(kernels.called)

    monkeypatch.setattr("text_generation_server.runner.LongestPause", NotedPause)
    runner = make_runner(model, kernels=cast(Kernels, kernels))
    runner.warmup(64, None, 4, None)
    assert {"embed", "rope_and_store_kv", "attend", "place", "sample", "advance"} <= set(called_before)


@pytest.mark.parametrize(("tokens", "longest"), [(1, 2), (1, 512), (64, 2), (64, 3), (64, 4), (64, 20)])
def test_the_small_steps_of_a_warm_up_fit_wherever_the_largest_does(model: Path, tokens: int, longest: int) -> None:
    runner = make_runner(model, max_total_tokens=longest)
    assert runner.warmup(tokens, longest, 1, None).max_total_tokens == longest
    assert runner.num_rows == 0


def test_a_warm_up_masks_the_rows_that_have_a_grammar_and_no_others(model: Path) -> None:
    masked: list[int] = []

    class NotedMasks(Noting):
        def sample(self, logits_RV: torch.Tensor, choices: Choices) -> Chosen:
            masked.append(len(choices.masks.rows_M) if choices.masks is not None else 0)
            return reference.sample(logits_RV, choices)

    kernels = NotedMasks(cast(Kernels, reference))
    make_runner(model, kernels=cast(Kernels, kernels)).warmup(64, None, 4, None)
    # A prompt, a prompt beside a row that decodes, a prompt without options, and the largest step.
    assert masked[:3] == [1, 2, 0] and masked[3] > 0


def test_a_warm_up_samples_with_every_option() -> None:
    assert [name for name in NAMES if getattr(EVERY_OPTION, name) == getattr(NEUTRAL, name)] == []


def test_a_warm_up_can_be_made_to_fail(runner: ModelRunner) -> None:
    faults.setup("shard.warmup:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            runner.warmup(63, None, 16, None)
    finally:
        faults.setup("")


def test_a_warm_up_with_the_values_of_the_one_before_measures_nothing(model: Path) -> None:
    first, second = make_runner(model), make_runner(model)
    capacity = first.warmup(64, None, 16, 1000)
    expected = generate(first, random_ids(5), 4).tokens
    second.measured = first.measured  # as a shard has it from its template
    faults.setup("shard.warmup:raise@every 1")
    try:
        for runner in (first, second):
            assert runner.warmup(64, None, 16, 1000) == capacity and runner.num_rows == 0
            assert generate(runner, random_ids(5), 4).tokens == expected
            with pytest.raises(faults.InjectedFault):
                runner.warmup(64, None, 16, 999)
            with pytest.raises(faults.InjectedFault):
                runner.warmup(64, None, 16, 1000)
    finally:
        faults.setup("")
    assert second.longest_pause_s > 0


def test_memory_of_a_process_that_may_have_written_anywhere_is_used_again_and_its_content_never_read(
    model: Path,
) -> None:
    first, second, kept = make_runner(model), make_runner(model), KeptMemory()
    first.kept = second.kept = kept
    capacity = first.warmup(64, None, 16, 1000, content=7)
    expected = generate(first, random_ids(40), 6).tokens
    for tensor in first._cache_tensors():
        tensor.view(torch.uint8).fill_(0xFF)  # NaN
    second.measured = first.measured
    assert second.warmup(64, None, 16, 1000, content=8) == capacity and not second.has_kept_cache
    assert all(bool((tensor[-2].view(torch.uint8) == 0xFF).all()) for tensor in second._cache_tensors())
    assert generate(second, random_ids(40), 6).tokens == expected and kept.content == 8


def test_a_cache_has_its_old_name_until_the_first_step_under_the_new_one(model: Path) -> None:
    shards, kept = [make_runner(model) for _ in range(2)], KeptMemory()
    for shard in shards:
        shard.kept = kept
    first, second = shards
    first.warmup(64, None, 16, 1000, content=7)
    second.measured = first.measured

    def is_kept(content: int, known: int) -> bool:
        second._row_state = None  # as in a new process
        second.warmup(64, None, 16, 1000, content=content, known_content=known)
        return second.has_kept_cache

    assert is_kept(8, known=7) and is_kept(9, known=7) and is_kept(10, known=9)
    assert [is_kept(name, known=8) for name in (11, 12)] == [False] * 2, "what is computed again has the new name only"
    assert is_kept(13, known=12)
    generate(second, random_ids(5), 1)
    assert not is_kept(14, known=12)
    generate(second, random_ids(5), 1)
    assert is_kept(15, known=14)
    kept.rename(0)
    assert not is_kept(16, known=14)


def told(runner: ModelRunner, *values: Any, again: bool = True) -> dict[bytes, tuple[list[int], list[int]]]:
    """Ids and slots of the rows that a Warmup tells a router that has not sent them."""
    capacity = runner.row_state.planner._limits.slots
    assert (runner.warmup(*(values or (64, None, 16, 1000)), content=9).slots == capacity) == again
    assert runner.num_rows == 0
    return {row.note: (row.ids.tolist(), row.slots.tolist()) for row in runner.computed}


def two_rows(runner: ModelRunner) -> tuple[Client, list[PromptChunk]]:
    """A client that has made three tokens of one request and one token of another, and a row that is not told."""
    client = fresh_client(runner)
    chunks = [replace(client.first_chunk(i, random_ids(5 + i, i)), note=b"%d" % i) for i in (1, 2)]
    client.step([], [chunks[0], client.first_chunk(3, random_ids(4))])
    client.step([1])
    client.step([1], [chunks[1]])
    return client, chunks


def test_a_warm_up_tells_a_router_that_has_not_sent_them_what_the_rows_have_computed(model: Path) -> None:
    runner = make_runner(model)
    runner.warmup(64, None, 16, 1000)
    client, chunks = two_rows(runner)
    chunk = replace(client.first_chunk(4, random_ids(30, 4), end=20), note=b"4")
    client.step([], [chunk])  # no logits tell that its keys are sound
    later = client.first_chunk(5, random_ids(30, 5), start=8)
    client.step([], [replace(later, end=20, last=False, note=b"5")])  # beginning with a cached prefix
    rows = told(runner)
    assert set(rows) == {b"1", b"2", b"5"}
    assert rows[b"1"][0] == [*chunks[0].ids.tolist(), *client.tokens[1][:2]]
    assert rows[b"1"][1][:6] == chunks[0].slots.tolist() and len(rows[b"1"][1]) == 8
    assert rows[b"2"] == (chunks[1].ids.tolist(), chunks[1].slots.tolist())
    assert rows[b"5"] == (later.ids[:8].tolist(), later.slots[:8].tolist())
    ids, slots = (torch.tensor(part, dtype=torch.int32) for part in rows[b"1"])
    # The request goes on in another row, with the keys that are there.
    again = Client(runner, client.slots)
    newest = torch.tensor(client.tokens[1][2:])
    history = torch.cat([ids, newest]).int()
    resumed = PromptChunk(
        1, len(ids), len(history), True, history, torch.cat([slots, again.take(1)]), len(chunks[0].ids), Sampling()
    )
    again.step([], [resumed])
    again.step([1])
    assert client.tokens[1] + again.tokens[1] == generate(runner, chunks[0].ids, 5).tokens[7]
    assert told(runner) == {}  # that request has no note


@pytest.mark.parametrize("harm", ["other values", "a step fails", "not finite", "left", "too many tokens"])
def test_a_warm_up_tells_nothing_of_rows_whose_keys_may_not_be_there(
    poisoned: ModelRunner, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned.warmup(64, None, 16, 1000)
    client, _ = two_rows(poisoned)
    if harm == "other values":
        assert told(poisoned, 64, None, 16, 999, again=False) == {}
        return
    if harm == "a step fails":
        with pytest.raises(StepError):
            client.step([9])
    elif harm == "not finite":
        client.step([], [client.first_chunk(8, torch.tensor([POISON]))])
        poisoned.filter(BATCH, [1, 2])
        client.step([1])
    elif harm == "too many tokens":  # to tell one row alone would hide that the other one has its slots
        monkeypatch.setattr(rows_of_step, "MAX_REPORTED", 10)
    else:
        poisoned.filter(BATCH, [2, 3])
    assert set(told(poisoned)) == ({b"2"} if harm == "left" else set())
    monkeypatch.undo()
    two_rows(poisoned)
    assert set(told(poisoned)) == {b"1", b"2"}


@pytest.mark.parametrize("point", ["shard.step", "shard.prefill", "shard.decode"])
def test_a_warm_up_passes_no_fault_point_of_steps(runner: ModelRunner, point: str) -> None:
    faults.setup(f"{point}:raise")
    try:
        runner.warmup(64, None, 16, None)
        with pytest.raises(faults.InjectedFault):
            generate(runner, random_ids(5), 2)
    finally:
        faults.setup("")


def test_a_step_can_be_made_to_fail_by_a_token_in_the_chunk_it_computes(runner: ModelRunner) -> None:
    runner.warmup(64, None, 16, None)
    ids = torch.arange(1, 9, dtype=torch.int32)
    faults.setup("shard.chunk[token=7]:raise@every 1")
    try:
        generate(runner, ids[:6], 2)
        for _ in range(2):
            client = fresh_client(runner)
            client.step([], [client.first_chunk(7, ids, end=6)])
            with pytest.raises(faults.InjectedFault):
                client.step([], [PromptChunk(7, 6, 8, last=True)])
    finally:
        faults.setup("")


def test_given_tokens_take_the_place_of_sampled_ones_and_are_computed_as_those(
    runner: ModelRunner, tmp_path: Path
) -> None:
    runner.warmup(64, None, 16, None)
    prompt, given, file = random_ids(9), [300, 5, 299], tmp_path / "ids"
    file.write_text(str(given))
    own = generate(runner, prompt, 4).tokens[7]
    faults.setup(f"shard.sampled:emit={file}")
    try:
        assert generate(runner, prompt, 4).tokens[7][:3] == given != own[:3]
        # A request that is resumed has part of its output in its history.
        client = fresh_client(runner)
        history = torch.cat([prompt, torch.tensor(given[:2])]).int()
        client.step([], [client.first_chunk(7, history, prompt_length=len(prompt))])
        client.step([7])
    finally:
        faults.setup("")
    after_given = generate(runner, torch.cat([prompt, torch.tensor(given)]).int(), 1).tokens[7]
    assert client.tokens[7] == [299, *after_given]


def test_loading_can_be_made_to_fail_half_way(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    loaded: list[None] = []
    faults.setup("shard.load:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            make_runner(tmp_path, on_tensor=lambda: loaded.append(None))
    finally:
        faults.setup("")
    assert len(loaded) == 15  # the fault is raised after half of the 30 tensors
