from text_generation_launcher.ray.own_node import end_with_node


def test_a_driver_ends_once_its_node_is_dead_and_not_while_that_is_unknown() -> None:
    answers = iter([True, None, None, True, False])
    ends: list[str] = []
    end_with_node(lambda: next(answers), lambda: ends.append("end"), lambda seconds: None)
    assert ends == ["end"]
    assert next(answers, None) is None
