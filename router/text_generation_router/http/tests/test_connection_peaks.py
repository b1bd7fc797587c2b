from text_generation_router.http.server import CROWD, ConnectionPeaks


def given_back_at(*connections: int) -> list[int]:
    """The places in `connections`, the numbers of open connections over time, at which memory is given back."""
    noted: list[int] = []
    places: list[int] = []
    peaks = ConnectionPeaks(lambda: places.append(len(noted)))
    for number in connections:
        peaks.note(number)
        noted.append(number)
    return places


def test_memory_is_given_back_once_when_a_crowd_has_gone():
    assert given_back_at(1, CROWD, CROWD // 2, CROWD // 4, 3, 0, 1) == [3]
    assert given_back_at(4 * CROWD, CROWD, 0) == [1, 2]


def test_connections_that_come_and_go_in_small_numbers_are_not_a_crowd():
    assert given_back_at(*[CROWD - 1, 0] * 9) == []
    assert given_back_at(CROWD, CROWD // 2, CROWD, CROWD // 2) == []
