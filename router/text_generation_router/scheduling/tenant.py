"""Who shares the server fairly with others."""

from text_generation_router.scheduling.share import Share

# Tokens that are made count twice as much as those that are read: about what they cost (Sheng et al., VTC).
OUTPUT_WEIGHT = 2


class Tenant:
    """The tokens it has been served, and how many requests it has running and waiting."""

    __slots__ = ("num_running", "num_waiting", "served", "share")

    def __init__(self, share: Share, served: float) -> None:
        self.share = share
        self.served = served
        self.num_running = 0
        self.num_waiting = 0
