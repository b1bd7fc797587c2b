"""How many examples a test with drawn values tries: a third of those of `make test-slow` in `make test`."""

from hypothesis import settings

MANY = 120  # in `make test-slow`, where a test asks for no other number


def examples(many: int, *, stateful_step_count: int = 50) -> settings:
    """`many`: in `make test-slow`, `make fuzz` and for mutants."""
    count = many if settings.default.max_examples >= MANY else -(-many // 3)
    return settings(max_examples=count, stateful_step_count=stateful_step_count, deadline=None)
