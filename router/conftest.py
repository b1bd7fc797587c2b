"""Sets how many steps state machine tests run: about 5,000 of the scheduler in `make test`, 100,000 and more in `make
fuzz`; how many texts the readers of calls get; and how many cases `make test-schema` sends to each route.
"""

from hypothesis import settings

settings.register_profile("test", max_examples=120, stateful_step_count=50, deadline=None)
settings.register_profile("fuzz", max_examples=3000, stateful_step_count=60, deadline=None)
settings.register_profile("schema", max_examples=1000, deadline=None)
settings.load_profile("test")
