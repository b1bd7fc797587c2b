"""The headers that successful answers carry."""

from collections.abc import Iterable, Sequence

from text_generation_router.api.common.generation import Timing


def stream_headers(compute_type: str, characters: int) -> dict[str, str]:
    return {
        "x-compute-type": compute_type,
        "x-compute-characters": str(characters),
        "x-accel-buffering": "no",  # without this header nginx buffers events
    }


def timing_headers(compute_type: str, timings: Sequence[Timing]) -> dict[str, str]:
    """Headers with the sums of times over all prompts of the request. Times are in milliseconds, except x-compute-time
    in seconds.
    """
    return {
        "x-compute-type": compute_type,
        "x-compute-time": str(sum(timing.total_s for timing in timings)),
        "x-compute-characters": str(sum(timing.prompt_characters for timing in timings)),
        "x-total-time": _milliseconds(timing.total_s for timing in timings),
        "x-validation-time": _milliseconds(timing.validation_s for timing in timings),
        "x-queue-time": _milliseconds(timing.queue_s for timing in timings),
        "x-inference-time": _milliseconds(timing.inference_s for timing in timings),
        "x-time-per-token": _milliseconds(t.inference_s / max(t.generated_tokens, 1) for t in timings),
        "x-prompt-tokens": str(sum(timing.prompt_tokens for timing in timings)),
        "x-generated-tokens": str(sum(timing.generated_tokens for timing in timings)),
    }


def _milliseconds(seconds: Iterable[float]) -> str:
    return str(sum(int(value * 1000) for value in seconds))
