"""How many examples a test with drawn values tries: a third of those of `make test-slow` in `make test`. How many steps
state machine tests run: about 2,000 of the scheduler in `make test`, 6,000 in `make test-slow`, 100,000 and more in
`make fuzz`. How many cases `make test-schema` sends to each route."""

from hypothesis import settings

MANY = 120  # in `make test-slow`, where a test asks for no other number

settings.register_profile("test", max_examples=MANY // 3, stateful_step_count=50, deadline=None)
settings.register_profile("many", max_examples=MANY, stateful_step_count=50, deadline=None)
settings.register_profile("fuzz", max_examples=3000, stateful_step_count=60, deadline=None)
settings.register_profile("schema", max_examples=1000, deadline=None)


def examples(many: int, *, stateful_step_count: int = 50) -> settings:
    """`many`: in `make test-slow`, `make fuzz` and for mutants."""
    count = many if settings.default.max_examples >= MANY else -(-many // 3)
    return settings(max_examples=count, stateful_step_count=stateful_step_count, deadline=None)
