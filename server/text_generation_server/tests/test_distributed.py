"""The collectives between the processes of a group, through shared memory and through gloo."""

import collective_tasks as tasks
import pytest
import torch
from collective_tasks import Ranks

from text_generation_common.errors import MemoryLimitError
from text_generation_server.distributed import Alone, Group, join_group
from text_generation_server.distributed.shared_memory import SLAB_BYTES, map_together
from text_generation_server.errors import GroupBroken

CPU = torch.device("cpu")
LONG = SLAB_BYTES // 4 * 2 + 3  # number of float32 values: more than two pieces, and not a multiple of a piece
SIZES = pytest.mark.parametrize("size", [2, 4])
TRANSPORTS = pytest.mark.parametrize("share_memory", [True, False], ids=["shared memory", "gloo"])
TENSORS = pytest.mark.parametrize(("count", "dtype"), [(5, "float32"), (LONG, "float32"), (LONG, "bfloat16")])


@SIZES
@TRANSPORTS
@TENSORS
def test_a_sum_has_the_bits_of_adding_in_rank_order_on_every_rank(
    ranks: Ranks, size: int, share_memory: bool, count: int, dtype: str
) -> None:
    total = tasks.noise(0, count, dtype).float()
    for rank in range(1, size):
        total = total + tasks.noise(rank, count, dtype).float()
    expected = tasks.digest(total.to(getattr(torch, dtype)))
    assert ranks.run(size, tasks.reduce_noise, count, dtype, share_memory=share_memory) == [expected] * size


@TRANSPORTS
@TENSORS
def test_rank_0_gathers_the_values_of_all_ranks_and_broadcasts_its_own(
    ranks: Ranks, share_memory: bool, count: int, dtype: str
) -> None:
    own = [tasks.digest(tasks.noise(rank, count, dtype)) for rank in range(4)]
    assert ranks.run(4, tasks.gather_noise, count, dtype, share_memory=share_memory) == [own, [], [], []]
    assert ranks.run(4, tasks.broadcast_noise, count, dtype, share_memory=share_memory) == [own[0]] * 4


@SIZES
@TRANSPORTS
def test_collectives_of_all_kinds_follow_each_other_whichever_rank_is_late(
    ranks: Ranks, size: int, share_memory: bool
) -> None:
    assert ranks.run(size, tasks.many_collectives, 100, share_memory=share_memory) == [0] * size


@pytest.mark.parametrize("what", ["kind", "type", "length"])
def test_ranks_that_are_out_of_step_raise_and_add_up_nothing(ranks: Ranks, what: str) -> None:
    for error in ranks.run(2, tasks.lose_step, what):
        assert error.startswith("GroupBroken") and error.count("collective 2 (") == 2


def test_ranks_stop_waiting_for_a_rank_that_does_not_come(ranks: Ranks) -> None:
    errors = ranks.run(3, tasks.stay_away, wait_s=0.5)
    assert [error.partition(":")[0] for error in errors] == ["GroupBroken", "", "GroupBroken"]
    assert "rank 1 did not come" in errors[0]


def test_a_group_that_never_gets_all_its_ranks_is_an_error(ranks: Ranks) -> None:
    with pytest.raises(GroupBroken, match="rank 1 of 2 could not join its group within 1 s"):
        join_group(1, 2, CPU, ranks.folder / "lonely", join_s=1.0)


def test_an_error_on_one_rank_is_raised_on_all_and_the_group_goes_on(ranks: Ranks) -> None:
    answers = ranks.run(4, tasks.agree, {2: ArithmeticError("overflow")})
    assert [sum_of_ones for _, sum_of_ones in answers] == [4.0] * 4
    others = "StepError: rank 2 of 4 could not prepare the step: its log says why"
    assert [error for error, _ in answers] == [others, others, "ArithmeticError: overflow", others]


def test_an_agreement_keeps_the_class_of_an_error_and_each_rank_its_own_error(ranks: Ranks) -> None:
    answers = ranks.run(3, tasks.agree, {1: MemoryLimitError("too small"), 2: ArithmeticError("overflow")})
    kinds = [error.partition(":")[0] for error, _ in answers]
    assert kinds == ["MemoryLimitError", "MemoryLimitError", "ArithmeticError"]
    assert ranks.run(2, tasks.agree, {}) == [("", 2.0), ("", 2.0)]


def test_an_error_among_collectives_breaks_a_group_but_not_a_single_rank(ranks: Ranks) -> None:
    errors = ranks.run(2, tasks.owe)
    assert errors[1] == "GroupBroken: rank 1 of 2 failed inside a step: ArithmeticError: overflow"
    alone = Group(0, 1, Alone())
    assert tasks.owe(alone) == "ArithmeticError: overflow"
    assert tasks.agree(alone, {0: ArithmeticError("overflow")}) == ("ArithmeticError: overflow", 1.0)


def test_shared_memory_listens_nowhere_and_gloo_on_the_loopback_only(ranks: Ranks) -> None:
    assert ranks.run(2, tasks.listening_addresses) == [[], []]
    for addresses in ranks.run(2, tasks.listening_addresses, share_memory=False):
        assert set(addresses) == {"0100007F"}


class Board:
    """A fake store that already holds what the other ranks have written."""

    def __init__(self, written: dict[str, str]) -> None:
        self._written = written

    def set(self, key: str, value: str) -> None:
        self._written.setdefault(key, value)

    def get(self, key: str) -> bytes:
        return self._written[key].encode()


@pytest.mark.parametrize(
    ("rank", "written"),
    [
        (1, {"memory": "", "mapped-0": "False"}),
        (1, {"memory": "/nowhere 5", "mapped-0": "True"}),
        (1, {"memory": "/dev/zero 5", "mapped-0": "True"}),
        (0, {"mapped-1": "False"}),
    ],
    ids=["rank 0 has none", "it cannot be opened", "it is something else", "rank 1 cannot map it"],
)
def test_memory_that_one_rank_cannot_map_is_used_by_no_rank(rank: int, written: dict[str, str]) -> None:
    assert map_together(rank, 2, Board(written)) is None  # type: ignore[arg-type]


def test_a_group_that_shares_memory_leaves_no_file_behind(ranks: Ranks) -> None:
    assert ranks.run(4, tasks.transport) == ["SharedMemory"] * 4
    assert not ranks.rendezvous.exists()
    assert ranks.run(2, tasks.transport, share_memory=False) == ["Gloo"] * 2
