"""One engine that runs a trace from its first arrival to its last token."""

from math import inf

from text_generation_benchmark.simulation.cost import StepCost
from text_generation_benchmark.simulation.metrics import Books, Outcome
from text_generation_benchmark.simulation.stepped import Arrival, SteppedEngine
from text_generation_benchmark.simulation.trace import RequestMaker, Trace
from text_generation_router.scheduling.limits import Limits


class SimulatedEngine(SteppedEngine):
    """Runs a trace to its end, once. `jumps=False` decides every step; the outcome is the same."""

    def __init__(self, trace: Trace, cost: StepCost, limits: Limits, bucket_s: float, jumps: bool = True) -> None:
        self._trace = trace
        self._trace_books = Books(trace, bucket_s)
        super().__init__(cost, limits, self._trace_books, jumps)

    def run(self) -> Outcome:
        """Runs the trace to its end. ValueError for a request that does not fit into the slots even alone."""
        requests, output_tokens = RequestMaker(self._trace), self._trace.output_tokens.tolist()
        for index, arrival_s in enumerate(self._trace.arrival_s.tolist()):
            self.advance(arrival_s)
            request = requests.make(index)
            needed = len(request.input_ids) + request.max_new_tokens
            if needed > self._limits.capacity:
                raise ValueError(
                    f"request {index + 1} of an engine's trace may need {needed} token slots, and there are"
                    f" {self._limits.capacity}: a router would refuse it, so leave it out"
                )
            self.submit(Arrival(arrival_s, index, request, output_tokens[index]))
        self.advance(inf)
        assert self.scheduler.is_idle and not self._live, "some requests never ended"
        return self._trace_books.outcome(self._limits.capacity, self.scheduler.counters)
