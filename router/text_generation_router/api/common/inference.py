"""From prompts to generations: permits first, then validation, then the engine's queue."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from text_generation_common.tasks import together
from text_generation_router.api.common.generation import Generation, close_all
from text_generation_router.api.common.generation_stream import GenerationStream
from text_generation_router.api.common.permits import Permit, Permits
from text_generation_router.engine.protocol import Engine
from text_generation_router.errors import BodyError, DeadlineError, InferenceError
from text_generation_router.fairness import LoopTurns
from text_generation_router.http.caller import Caller
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.metrics.tracing import Tracer
from text_generation_router.scheduling.request import GenerationRequest, Share
from text_generation_router.text.tokens.detokenization import Vocabulary
from text_generation_router.text.validation import Prompt, Validator, copies_of

# Maximum number of readers that get new tokens in one turn of the event loop: each takes up to half a millisecond to
# write its event.
WAKES_PER_TURN = 16


class Inference:
    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        validator: Validator,
        permits: Permits,
        metrics: Metrics,
        tracer: Tracer | None = None,
    ) -> None:
        self.validator = validator
        self._engine = engine
        self.vocabulary = vocabulary
        self._permits = permits
        self._metrics = metrics
        self._tracer = tracer
        self._wakes = LoopTurns(WAKES_PER_TURN)

    async def start(
        self, prompts: Sequence[Prompt], caller: Caller, started_s: float, *, is_answer: bool = True
    ) -> list[Generation]:
        """Queues all prompts or none, each as many times as it has copies. `is_answer`: False for texts that
        only help to make an answer's prompt, of which metrics count the failures alone. Raises InferenceError. The
        caller must close the generations."""
        count = sum(prompt.copies for prompt in prompts)
        with self.counted_failures():
            permit = self._permits.take(caller.share, count)
            generations, noted = list[Generation](), set[str]()
            try:
                work = together(self.validator.validate(prompt, caller.share, noted.add) for prompt in prompts)
                requests = await permit.unless_refused(work)
                for name in sorted(noted):
                    caller.note(name)
                answers: list[Unanswered] = []
                for prompt, request in zip(prompts, requests, strict=True):
                    copies = [
                        self._generation(prompt, copy, caller, started_s=started_s, permit=permit, is_answer=is_answer)
                        for copy in copies_of(prompt, request)
                    ]
                    streams = [generation.stream for generation in copies]
                    answer = GenerationStream.submit(streams)
                    generations += copies
                    if answer is not None:
                        answers.append((streams, answer))
                if answers:
                    await permit.unless_refused(_accepted(answers))
            except BaseException:
                permit.give_back(count - len(generations))
                close_all(generations)
                raise
            self._begin_traces(generations)
            permit.submitted([generation.stream for generation in generations])
            return generations

    @contextmanager
    def permit(self, share: Share) -> Iterator[None]:
        """Holds a permit during work that is not a generation. Raises OverloadedError if there is no permit for
        `share`.
        """
        permit = self._permits.take(share, 1)
        permit.begin()
        try:
            yield
        finally:
            permit.give_back(1)

    @contextmanager
    def counted_failures(self) -> Iterator[None]:
        """Counts a refusal that is raised inside the context, before a generation has begun. The stream of a generation
        counts a later failure, which is not counted here again."""
        try:
            yield
        except BodyError:
            raise  # the body is not a request, so no request failed
        except InferenceError as error:
            if not error.is_counted:
                error.is_counted = True
                self._metrics.request_failure.labels(err=error.label).inc()
            raise

    @contextmanager
    def counted_refusals(self, requests: int) -> Iterator[None]:
        """To be used around reading a body. If a field is refused, counts `requests` requests and one failure. A body
        that passes is counted by the route; a body that is not a request is not counted.
        """
        try:
            with self.counted_failures():
                yield
        except BodyError:
            raise
        except InferenceError:
            self._metrics.count_requests(requests)
            raise

    def _generation(
        self,
        prompt: Prompt,
        request: GenerationRequest,
        caller: Caller,
        started_s: float,
        permit: Permit,
        is_answer: bool,
    ) -> Generation:
        left_s = _time_left_s((request.timeout_s, caller.timeout_s), started_s)
        # The namespace is a tuple and not a joined string, so that no salt can imitate the namespace of another caller.
        namespace = (*caller.cache_domain, *request.namespace)
        request = replace(request, share=caller.share, namespace=namespace, timeout_s=left_s)
        if is_answer:
            self._metrics.request_input_length.observe(len(request.input_ids))
            self._metrics.request_max_new_tokens.observe(request.max_new_tokens)
        rules = prompt.parameters.text_rules(self.validator.limits.eos_token_ids)
        return Generation(
            stream=GenerationStream(
                engine=self._engine,
                vocabulary=self.vocabulary,
                metrics=self._metrics,
                request=request,
                wakes=self._wakes,
                rules=rules,
                names=prompt.names,
                grammar_field=prompt.parameters.wanted_grammar.field,
            ),
            permit=permit,
            metrics=self._metrics,
            prompt_tokens=len(request.input_ids),
            prompt_characters=len(prompt.inputs),
            input_ids=request.input_ids if prompt.parameters.returns_ids else (),
            reader=prompt.reader() if prompt.reader is not None else None,
            started_s=started_s,
            is_answer=is_answer,
        )

    def _begin_traces(self, generations: Sequence[Generation]) -> None:
        if self._tracer is not None:
            for generation in generations:
                generation.trace = self._tracer.begin(generation.stream.request)

    async def results(
        self, prompts: Sequence[Prompt], caller: Caller, started_s: float, *, is_answer: bool = True
    ) -> list[Generation]:
        """Runs all prompts at the same time, to their ends. If one prompt fails, the others are cancelled. `is_answer`:
        see `start`."""
        generations = await self.start(prompts, caller, started_s, is_answer=is_answer)
        try:
            return await together(generation.collect() for generation in generations)
        finally:
            close_all(generations)


# The streams of one prompt, and the future of the engine's answer to their submission.
Unanswered = tuple[Sequence[GenerationStream], asyncio.Future[None]]


async def _accepted(answers: Sequence[Unanswered]) -> None:
    """Waits until the engine has accepted all streams. Raises InferenceError if it refuses some."""
    await asyncio.gather(*(GenerationStream.accepted(streams, answer) for streams, answer in answers))


def _time_left_s(timeouts_s: Sequence[float | None], started_s: float) -> float | None:
    """Seconds left of the smallest timeout since `started_s`; None without a timeout. Raises DeadlineError at 0."""
    given = [timeout_s for timeout_s in timeouts_s if timeout_s is not None]
    if not given:
        return None
    left_s = min(given) - (time.perf_counter() - started_s)
    if left_s <= 0:
        raise DeadlineError
    return left_s
