"""When waiting requests may join, counted in steps: TGI's longest wait, and the pause after a refusal for lack of
memory.
"""

# A request refused for lack of memory is tried again after RETRY_STEPS forward steps, or once enough slots are free.
RETRY_STEPS = 8


class JoinTimes:
    def __init__(self, max_waiting_tokens: int) -> None:
        self.num_forwards = 0  # number of forward steps until now
        self._max_waiting_tokens = max_waiting_tokens
        self._waiting_tokens = 0  # decode steps since a request last joined (TGI's name)
        # After a refusal for lack of memory: the forward step of the next try, and the slots that were missing.
        self._retry_at = 0
        self._missing = 0

    def note_forward(self, steps: int, decodes: bool) -> None:
        """Counts `steps` forward steps. `decodes`: each makes tokens for running requests, with or without chunks."""
        self.num_forwards += steps
        if decodes:
            self._waiting_tokens += steps

    @property
    def steps_until_wait_is_over(self) -> int:
        """Decode steps until waiting requests may join, however few they are."""
        return max(0, self._max_waiting_tokens - self._waiting_tokens)

    def restart_wait(self) -> None:
        self._waiting_tokens = 0

    @property
    def steps_until_retry(self) -> int:
        """Forward steps until the end of the pause after a refusal."""
        return max(0, self._retry_at - self.num_forwards)

    def pause(self, missing: int) -> None:
        """Begins the pause after a refused request, which lacked `missing` slots."""
        self._retry_at = self.num_forwards + RETRY_STEPS
        self._missing = missing

    def note_freed(self, slots: int) -> None:
        """Notes that `slots` token slots were just freed: the pause ends once enough are free."""
        self._missing -= slots
        if self._missing <= 0:
            self.retry_now()

    def retry_now(self) -> None:
        self._retry_at = 0

    def retry_next_step(self) -> None:
        self._retry_at = min(self._retry_at, self.num_forwards + 1)
