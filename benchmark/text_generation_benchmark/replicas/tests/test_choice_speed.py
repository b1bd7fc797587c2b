"""The measurement of a front's choice runs, and chooses by what engines have cached."""

from text_generation_benchmark.replicas import choice_speed


def test_the_measured_front_knows_the_caches_of_its_engines() -> None:
    random = choice_speed.np.random.default_rng(0)
    chats = [choice_speed._prompt(random, choice_speed.CHAT_BLOCKS) for _ in range(4)]
    front = choice_speed._front(random, 3, chats, [])
    hashes = [choice_speed._hashes(chat) for chat in chats]
    matched = [front._placement.index.matched(each).tolist() for each in hashes]
    assert matched == [[50, 20, 20], [20, 50, 20], [20, 20, 50], [50, 20, 20]]


def test_all_rows_are_measured() -> None:
    lines = choice_speed.measure(3, 10).splitlines()
    assert len(lines) == 6 and all("| 0 |" not in line for line in lines[4:])
