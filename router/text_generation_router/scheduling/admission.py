"""Whether a request may start: only when everything it may ever need is there, so that no running one can run out."""


class Reservation:
    """Reserves prompt + max_new_tokens slots for each admitted request, until they are given back."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = 0

    def fits(self, tokens: int) -> bool:
        return self.reserved + tokens <= self.capacity

    def admit(self, tokens: int) -> None:
        assert self.fits(tokens)
        self.reserved += tokens

    def give_back(self, tokens: int) -> None:
        self.reserved -= tokens
        assert self.reserved >= 0
