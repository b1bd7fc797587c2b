"""Decode steps as graphs: which steps are recorded, and that a replay gives the same result as the step without a
graph.

Without a GPU, a recording is the recorded Python function, run again into the same output. Like a graph it reads only
the tensors at the addresses with which it was recorded."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
import torch
from shard_tools import ALONE, SAMPLED, Client, fresh_client, make_runner, random_ids, scattered_slots
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from text_generation_common.models.config import read_config
from text_generation_common.sampling import Sampling
from text_generation_server.device.graphs import CudaRecorder, DecodeGraphs
from text_generation_server.device.transfers import HostMoment
from text_generation_server.distributed import Alone, Group
from text_generation_server.kernels import reference
from text_generation_server.kernels.interface import Kernels
from text_generation_server.load import Shard
from text_generation_server.runner import ModelRunner
from text_generation_server.step.layout import MAX_CHUNKS, DecodeInputs
from text_generation_server.step.rows import PromptChunk, Rows

CPU = torch.device("cpu")
WARMUP = (128, None, 16, None)
ANOTHER = (128, None, 17, None)  # with the same values the memory would stay, and its graphs


class FakeRecorder:
    def __init__(self, failing: str | None = None) -> None:
        self.recorded = 0
        self.replayed = 0
        self.failing = failing

    def __call__(self, run: Callable[[], Tensor]) -> "FakeRecording":
        self.recorded += 1
        if self.failing:
            raise torch.OutOfMemoryError(self.failing)
        return FakeRecording(self, run)


class FakeRecording:
    def __init__(self, recorder: FakeRecorder, run: Callable[[], Tensor]) -> None:
        self.output = run().clone()
        self._recorder = recorder
        self._run = run

    def replay(self) -> None:
        self._recorder.replayed += 1
        self.output.copy_(self._run())


def nothing() -> None:
    pass


def counting(value: list[int]) -> Callable[[Callable[[], None]], Tensor]:
    """A forward whose result is the present content of `value`."""
    return lambda on_layer: torch.tensor(value)


def test_a_step_is_padded_to_the_next_size_and_left_alone_beyond_the_last() -> None:
    graphs = DecodeGraphs((8, 1, 4, 4), FakeRecorder())
    assert [graphs.size(rows) for rows in (1, 2, 4, 5, 8, 9, 100)] == [1, 4, 4, 8, 8, 9, 100]
    assert [DecodeGraphs((), FakeRecorder()).size(rows) for rows in (1, 3)] == [1, 3]


def test_only_sizes_that_the_rows_may_need_are_recorded_and_the_largest_first() -> None:
    graphs = DecodeGraphs((8, 1, 4, 4), FakeRecorder())
    assert [graphs.sizes_to_record(rows) for rows in (1, 2, 4, 8, 9)] == [[1], [4, 1], [4, 1], [8, 4, 1], [8, 4, 1]]
    # A size that is run, so that kernels are compiled, although it is not recorded.
    assert DecodeGraphs((), FakeRecorder()).sizes_to_record(100) == [1]


def test_a_recorded_size_is_replayed_and_others_never_recorded_under_load() -> None:
    recorder, place = FakeRecorder(), [0]
    graphs = DecodeGraphs((2, 4), recorder)
    for size in (4, 2, 3):
        graphs.record(size, counting(place), nothing)
    for use in range(3):
        for size in (2, 3, 4, 5):
            place[0] = 10 * use + size
            assert graphs.run(size, counting(place), nothing).tolist() == place
    assert (recorder.recorded, recorder.replayed) == (2, 6)


def test_a_recording_and_a_replay_are_signs_of_life() -> None:
    signs: list[None] = []

    def layer(on_layer: Callable[[], None]) -> Tensor:
        on_layer()
        return torch.tensor(1)

    graphs = DecodeGraphs((2,), FakeRecorder())
    graphs.record(2, layer, lambda: signs.append(None))
    assert len(signs) == 2  # the size runs once to compile its kernels, and once to be recorded
    graphs.run(2, counting([1]), lambda: signs.append(None))
    assert len(signs) > 2


def test_a_recording_that_fails_costs_one_line_and_steps_go_on_without(caplog: pytest.LogCaptureFixture) -> None:
    recorder = FakeRecorder(failing="CUDA out of memory.\nTried to allocate")
    graphs = DecodeGraphs((1, 2), recorder)
    graphs.record(2, counting([2]), nothing)
    recorder.failing = None
    graphs.record(1, counting([7]), nothing)
    for _ in range(3):
        for size in (1, 2):
            assert graphs.run(size, counting([size]), nothing).tolist() == ([7] if size == 1 else [size])
    assert recorder.recorded == 2 and recorder.replayed == 3
    assert [r.getMessage() for r in caplog.records] == [
        "no CUDA graph for 2 rows, whose steps run without one and slower: CUDA out of memory."
    ]


def test_a_recording_that_failed_on_another_rank_is_not_used() -> None:
    said: list[bool] = []
    recorder = FakeRecorder()

    def agree(mine: bool) -> bool:
        said.append(mine)
        return False

    graphs = DecodeGraphs((2,), recorder, agree)
    graphs.record(2, counting([1]), nothing)
    for _ in range(3):
        graphs.run(2, counting([1]), nothing)
    assert said == [True] and recorder.replayed == 0


def test_cleared_graphs_are_not_replayed() -> None:
    recorder = FakeRecorder()
    graphs = DecodeGraphs((2,), recorder)
    graphs.record(2, counting([1]), nothing)
    graphs.clear()
    assert graphs.run(2, counting([5]), nothing).tolist() == [5] and recorder.replayed == 0


class FakeGraph:
    """A CUDA graph, as far as the recorder sees it."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def capture_begin(self, **_: object) -> None:
        self._events.append("begin")

    def capture_end(self) -> None:
        self._events.append("end")


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    events: list[str] = []
    monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: FakeGraph(events))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: events.append("waited for the device"))

    def run() -> Tensor:
        events.append(f"collects: {gc.isenabled()}")
        if fails:
            raise RuntimeError("no memory")
        return torch.zeros(1)

    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="no memory") if fails else nullcontext():
        CudaRecorder()(run)
    assert gc.isenabled()
    assert events == ["waited for the device", "begin", "collects: False", "end"]


class Cyclic(FakeRecording):
    """A recording that is freed by the garbage collector only."""

    def __init__(self, recorder: FakeRecorder, run: Callable[[], Tensor]) -> None:
        super().__init__(recorder, run)
        self._self = self


class CloseTransport(Alone):
    """Notes, when the group is left, how many recordings are alive. NCCL would wait for their end."""

    def __init__(self) -> None:
        self.recordings: list[weakref.ref[Cyclic]] = []
        self.alive_at_close: list[int] = []

    def record(self, run: Callable[[], Tensor]) -> Cyclic:
        recording = Cyclic(FakeRecorder(), run)
        self.recordings.append(weakref.ref(recording))
        return recording

    def close(self) -> None:
        self.alive_at_close.append(sum(recording() is not None for recording in self.recordings))


def test_the_inputs_of_decode_steps_stay_at_the_same_addresses() -> None:
    rows = Rows(5, 16, CPU, padding_slot=99)
    inputs = DecodeInputs(8, rows, padding_slot=99)
    addresses = set()
    for chosen, slots in (([3, 1], [7, 8]), ([0], [5]), ([4, 2], [1, 2])):
        rows.lengths[:5] = 1
        inputs.fill(torch.tensor(chosen).int().numpy(), torch.tensor(slots).int().numpy(), size=4)
        step = inputs.step_input(reference, size=4, tokens=6)
        addresses.add(step.rows_R.data_ptr())
        padding = [rows.padding] * (4 - len(chosen))
        assert step.rows_R.tolist() == chosen + padding
        assert step.slots_T.tolist() == slots + [99] * (6 - len(slots))
        assert step.lengths_R.tolist() == [1] * 4 and step.positions_T.tolist() == [0] * 6
        assert rows.table[chosen, 0].tolist() == slots and rows.table[rows.padding, 0] == 99
    assert len(addresses) == 1


def play(runner: ModelRunner) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    """Requests join and leave, so that rows, lengths, slots and the number of rows change from step to step."""
    runner.clear(None)
    client = Client(runner, scattered_slots(runner, seed=4))
    client.step([], [client.first_chunk(i, random_ids(5 + 30 * i, i), parameters=SAMPLED) for i in range(3)])
    for decoding in ([0, 1, 2], [2, 0, 1], [1], [1], [2, 1]):
        client.step(decoding)
    client.step([1, 2], [client.first_chunk(i, random_ids(40 + i, i), parameters=Sampling()) for i in (5, 6, 7, 8)])
    for decoding in ([8, 1, 2, 5, 6, 7], [8, 1, 2, 5, 6, 7], [0, 5, 7], [6, 8], [0, 1, 2, 5, 6, 7, 8]):
        client.step(decoding)
    return client.tokens, client.logprobs


def test_replayed_steps_give_the_same_results_to_the_bit(model: Path) -> None:
    plain = make_runner(model)
    plain.warmup(*WARMUP)
    recorder = FakeRecorder()
    graphed = make_runner(model, graphs=DecodeGraphs((1, 2, 4), recorder, ALONE.all_agree))
    graphed.warmup(*WARMUP)
    assert recorder.recorded == 3
    assert play(graphed) == play(plain)
    assert recorder.recorded == 3 and recorder.replayed > 6


def play_mixed(runner: ModelRunner) -> tuple[dict[int, list[int]], dict[int, list[float]], list[list[float]]]:
    """Prompts of few tokens join rows that decode, alone and several at once, whole and in chunks. The last result are
    the log-probabilities of the prompts of requests 2 and 5, step after step."""
    runner.clear(None)
    client = Client(runner, scattered_slots(runner, seed=5))
    client.step([], [client.first_chunk(1, random_ids(9, 1), parameters=SAMPLED)])
    outputs = [
        client.step([1], [client.first_chunk(2, random_ids(30, 2), end=12, prompt_logprobs=0)]),
        client.step([1], [PromptChunk(2, 12, 20, last=False), client.first_chunk(3, random_ids(3, 3))]),
        client.step([3, 1], [PromptChunk(2, 20, 30, last=True), client.first_chunk(4, random_ids(2, 4), end=1)]),
        client.step([2, 1], [PromptChunk(4, 1, 2, last=True)]),
        client.step(
            [1, 2, 3, 4],
            [
                client.first_chunk(5, random_ids(50, 5), parameters=SAMPLED, prompt_logprobs=2),
                client.first_chunk(6, random_ids(50, 6), parameters=SAMPLED),
            ],
        ),
        client.step([1, 2, 3], [client.first_chunk(7, random_ids(20, 7), parameters=SAMPLED)]),
    ]
    client.step([7, 5, 6, 4, 3, 2, 1])
    return client.tokens, client.logprobs, [o.prompts.logprobs.tolist() for o in outputs if o.prompts is not None]


@pytest.mark.parametrize("kernels", [None, cast(Kernels, reference)], ids=["of this CPU", "reference"])
def test_replayed_steps_with_chunks_give_the_same_results_to_the_bit(model: Path, kernels: Kernels | None) -> None:
    plain = make_runner(model, kernels=kernels)
    plain.warmup(*WARMUP)
    recorder = FakeRecorder()
    graphed = make_runner(model, kernels=kernels, mixed_graphs=DecodeGraphs((16, 64), recorder))
    for warmup in (WARMUP, ANOTHER):  # after another warm-up graphs of the old memory are gone
        graphed.warmup(*warmup)
        replayed = play_mixed(graphed)
        assert replayed == play_mixed(plain) and [len(values) for values in replayed[2]] == [12, 8, 9, 49]
    assert (recorder.recorded, recorder.replayed) == (4, 2 * 6)


def test_a_step_that_a_graph_would_pad_too_much_or_with_too_many_chunks_runs_without(model: Path) -> None:
    recorder = FakeRecorder()
    runner = make_runner(model, mixed_graphs=DecodeGraphs((16, 200), recorder))
    runner.warmup(128, None, 40, None)
    for prompts, replays in (([135], 0), ([136], 1), ([9] * MAX_CHUNKS, 1), ([9] * (MAX_CHUNKS + 1), 0), ([201], 0)):
        client, before = fresh_client(runner), recorder.replayed
        client.step([], [client.first_chunk(i, random_ids(n, i)) for i, n in enumerate(prompts)])
        assert recorder.replayed - before == replays


def test_after_another_warm_up_graphs_of_the_old_memory_are_gone(model: Path) -> None:
    recorder = FakeRecorder()
    graphed = make_runner(model, graphs=DecodeGraphs((4, 8), recorder))
    graphed.warmup(*WARMUP)
    first = play(graphed)
    graphed.warmup(*ANOTHER)
    assert play(graphed) == first and recorder.recorded == 4


def test_a_group_is_left_when_no_recording_is_alive(model: Path) -> None:
    transport = CloseTransport()
    group, moments = Group(0, 1, transport), []

    def mark() -> HostMoment:
        moments.append([recording() is not None for recording in transport.recordings])
        return HostMoment()

    runner = make_runner(model, group=group, graphs=DecodeGraphs((1, 4), transport.record), mark=mark)
    runner.warmup(*WARMUP)
    assert len(transport.recordings) == 2
    config = read_config(model)
    Shard(runner, group, Tokenizer(WordLevel({"a": 0})), config, torch.float32, CPU, "reference").close()
    assert transport.alive_at_close == [0]
    assert moments[-1] == [False, False]  # the device is waited for after the recordings are dropped
