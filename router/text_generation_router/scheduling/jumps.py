"""Shortcuts for simulations: counts the next steps that change nothing but the numbers of tokens, and jumps over them.

A jump leaves exactly the state that the same number of single steps leaves (tests/test_jumps.py). `_quiet_for_joining`
follows the rules of `Joining` and must change with them.
"""

from collections.abc import Callable

from text_generation_router.scheduling.running import Running, send_tokens
from text_generation_router.scheduling.scheduler import Scheduler


def quiet_steps(scheduler: Scheduler) -> int:
    """Number of next decode steps that carry the same rows as the steps in flight and end no request, provided that no
    request arrives, ends early or is cancelled meanwhile. 0: the next step is different.
    """
    active, sent = scheduler.active, list(scheduler.steps)
    running = active.running.values()
    if not running or active.have_departed_rows or active.leaving or not all(r.wants_token for r in running):
        return 0
    if any(step.chunks or len(step.decode_ids) != len(running) for step in sent):
        return 0
    if scheduler.steps.newest - scheduler.steps.answered != len(sent):
        return 0  # a step that makes no tokens is in flight, so there are fewer tokens to come than steps
    left = min(r.request.max_new_tokens - r.num_sent for r in running) - (not sent)
    return max(0, min(left, scheduler.memory.num_available // len(running), _quiet_for_joining(scheduler)))


def _quiet_for_joining(scheduler: Scheduler) -> int:
    """Number of next decode steps in which no request joins, whatever tokens they make. No running request may be
    paused or prefilling.
    """
    joining, queue, limits = scheduler.joining, scheduler.queue, scheduler.limits
    running = scheduler.active.running
    is_full = len(running) >= limits.max_running
    if not len(queue) or (is_full and joining.places.claim(running) is None):
        return limits.capacity
    if queue.has_suspect_next:
        return 0
    if not joining.are_enough(len(running)) and joining.places.owed(running) is None:
        return joining.times.steps_until_wait_is_over
    return joining.times.steps_until_retry


def jump(scheduler: Scheduler, steps: int, token_of: Callable[[Running], int]) -> None:
    """Advances the state by `steps` decode steps, at most `quiet_steps()`, as if they had been decided and answered:
    each running request gets the token `token_of(request)` `steps` times. Steps in flight stay in flight."""
    for request in scheduler.active.running.values():
        scheduler.memory.take(request, steps)
        request.add_tokens((token_of(request),) * steps)
        request.tenant.serve_output(steps)
    send_tokens(scheduler.active.running.values(), steps, scheduler.steps.newest)
    scheduler.joining.times.note_forward(steps, decodes=True)
