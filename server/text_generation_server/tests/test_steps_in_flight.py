"""Steps that are launched before earlier steps are read, and the work of the host for a step in which nothing has
changed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from shard_tools import (
    BATCH,
    SAMPLED,
    Client,
    fresh_client,
    generate,
    make_runner,
    random_ids,
    scattered_slots,
    warm_runner,
)

from text_generation_server.device.memory import gpu_bytes
from text_generation_server.device.transfers import HostMoment, send
from text_generation_server.distributed import Alone, Group
from text_generation_server.errors import GroupBroken, StepError
from text_generation_server.runner import ModelRunner
from text_generation_server.step.results import Pending, StepOutput, completed
from text_generation_server.step.rows import StepBatch

GIB = 2**30


@pytest.fixture(scope="module")
def runner(model: Path) -> ModelRunner:
    return warm_runner(model)


def launch(client: Client, ids: list[int]) -> Pending[StepOutput]:
    return client.runner.step([StepBatch(BATCH, ids)], client.take(len(ids)), BATCH, [])


def test_answers_are_those_of_their_steps_however_late_they_are_read(runner: ModelRunner) -> None:
    alone = generate(runner, random_ids(20), 8, SAMPLED)
    client = fresh_client(runner)
    client.step([], [client.first_chunk(i, random_ids(20), parameters=SAMPLED) for i in (7, 8)])
    pending = [launch(client, ids) for ids in ([7, 8], [8, 7], [7, 8], [7], [7], [7], [7])]
    runner.filter(BATCH, [7])
    outputs = [step.wait() for step in reversed(pending)][::-1]
    said = [int(o.token_ids[o.request_ids.index(7)]) for o in outputs]
    assert client.tokens[7] + said == alone.tokens[7]
    assert [sorted(o.batch_request_ids) for o in outputs] == [
        [7, 8]
    ] * 7  # the requests at the time of the step, not the requests now


def test_an_unchanged_batch_is_looked_up_once_and_a_changed_one_again(runner: ModelRunner) -> None:
    client, planner = fresh_client(runner), runner.row_state.planner
    client.step([], [client.first_chunk(i, random_ids(9, i)) for i in (1, 2)])

    def looked_up() -> object:
        return planner.prepare([StepBatch(BATCH, [1, 2])], client.take(2), BATCH, []).decode

    assert looked_up() is looked_up()
    before = looked_up()
    runner.clear(BATCH)
    with pytest.raises(StepError, match="batch 1 with 2 requests is not what this shard holds"):
        looked_up()
    client.step([], [client.first_chunk(i, random_ids(9, i)) for i in (2, 1)])
    after = looked_up()
    assert after.request_ids == [1, 2] and after is not before  # type: ignore[attr-defined]
    assert after.rows == tuple(runner.row_state.batches.rows.row(i) for i in (1, 2))  # type: ignore[attr-defined]


def test_a_merged_batch_is_gone_even_if_the_last_step_asked_for_it(runner: ModelRunner) -> None:
    client = fresh_client(runner)
    runner.step([], client.take(0), 1, [client.first_chunk(1, random_ids(9))]).wait()
    runner.step([], client.take(0), 2, [client.first_chunk(2, random_ids(9))]).wait()
    both = [StepBatch(1, [1]), StepBatch(2, [2])]
    assert runner.step(both, client.take(2), 0, []).wait().batch_id == 1
    with pytest.raises(StepError, match="batch 2"):
        runner.step(both, client.take(2), 0, [])
    assert runner.step([StepBatch(1, [1, 2])], client.take(2), 0, []).wait().request_ids == [1, 2]


def test_a_step_that_names_a_request_twice_is_refused(runner: ModelRunner) -> None:
    client = fresh_client(runner)
    client.step([], [client.first_chunk(1, random_ids(9))])
    with pytest.raises(StepError, match="names a request twice"):
        client.step([1, 1])


class Twin(Alone):
    """Takes the role of the other rank of two: it exchanges the same numbers as this rank."""

    def all_reduce(self, x: torch.Tensor) -> None:
        if x.dtype == torch.int64:
            x += x.flip(0)


class Broken(HostMoment):
    def wait(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nsomewhere")


@pytest.mark.parametrize(("size", "kind"), [(1, RuntimeError), (2, GroupBroken)])
def test_an_error_of_the_device_is_raised_where_the_result_is_awaited(
    model: Path, size: int, kind: type[Exception]
) -> None:
    moments: list[type[HostMoment]] = [HostMoment]
    runner = make_runner(model, group=Group(0, size, Twin() if size > 1 else Alone()), mark=lambda: moments[-1]())
    runner.warmup(64, None, 4, None)
    moments.append(Broken)
    client = Client(runner, scattered_slots(runner))
    pending = runner.step([], client.take(0), BATCH, [client.first_chunk(7, random_ids(5))])
    with pytest.raises(kind, match="illegal memory access"):
        pending.wait()


def test_a_result_is_converted_when_it_is_read() -> None:
    converted: list[int] = []
    pending = completed(20).then(lambda x: converted.append(x) or x + 1)
    assert pending.is_complete() and not converted
    assert pending.wait() == 21 and converted == [20]


def test_sent_parts_arrive_and_begin_at_multiples_of_16_bytes() -> None:
    parts = [np.arange(count, dtype=np.int32) + count for count in (1, 0, 5, 4)]
    there = send(parts, torch.device("cpu"))
    assert [x.tolist() for x in there] == [part.tolist() for part in parts]
    assert all((x.data_ptr() - there[0].data_ptr()) % 16 == 0 for x in there if len(x))


def test_a_gpu_gives_its_free_memory_but_a_tenth_of_the_whole_and_at_most_the_shard_s_part() -> None:
    assert gpu_bytes(70 * GIB, 80 * GIB, 8 * GIB, fraction=1.0) == 62 * GIB
    assert gpu_bytes(70 * GIB, 80 * GIB, 8 * GIB, fraction=0.5) == 28 * GIB
    assert gpu_bytes(30 * GIB, 80 * GIB, 8 * GIB, fraction=0.5) == 22 * GIB  # other processes have half of the device
    assert gpu_bytes(5 * GIB, 80 * GIB, 8 * GIB, fraction=0.5) == 0
