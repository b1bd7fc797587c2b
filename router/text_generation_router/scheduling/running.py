"""One request on its way: what it has said, what has been sent for it, what it holds."""

from dataclasses import dataclass, field

import numpy as np

from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.slots import Slots

NO_SLOTS: Slots = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Running:
    """`input_ids + output_ids` is the truth of a request: from it the request can be started again, anywhere.

    What is *sent* runs ahead of what is *confirmed* (`output_ids`), because a step is decided before the one ahead of
    it has answered.
    """

    id: int  # also the order of arrival
    request: GenerationRequest
    output_ids: list[int] = field(default_factory=list)
    slots: Slots = field(default_factory=lambda: NO_SLOTS)  # of positions 0, 1, …; as many as are held
    num_slots: int = 0
    prefill_to: int = 0  # length of the history that a (re)start computes
    prefilled: int = 0  # how much of it has been sent
    num_sent: int = 0  # output tokens whose step has been sent, confirmed or not
    last_step: int = 0  # the last step sent that contains it
    failures: int = 0  # failed steps since its last confirmed token
    ended: bool = False
    paused: bool = False  # its reader is so far behind that it gets no more tokens for now

    @property
    def reservation(self) -> int:
        return len(self.request.input_ids) + self.request.max_new_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.prefilled < self.prefill_to

    @property
    def wants_token(self) -> bool:
        """Whether another decode step may carry it: it has begun, somebody reads, and its end is not yet on its way."""
        return not (self.ended or self.paused or self.is_prefilling) and self.num_sent < self.request.max_new_tokens

    def start(self) -> None:
        """Ready for a prefill of everything it has said so far, holding nothing."""
        self.prefill_to = len(self.request.input_ids) + len(self.output_ids)
        self.prefilled = 0
        self.num_sent = len(self.output_ids)
        self.slots = np.empty(self.reservation, dtype=np.int32)
        self.num_slots = 0

    def add_slots(self, slots: Slots) -> None:
        self.slots[self.num_slots : self.num_slots + len(slots)] = slots
        self.num_slots += len(slots)

    def take_slots(self) -> Slots:
        """Everything it holds, which it holds no longer."""
        held = self.slots[: self.num_slots]
        self.slots, self.num_slots = NO_SLOTS, 0
        return held
