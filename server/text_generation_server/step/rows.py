"""The rows of running requests, all on the device: slots of their tokens, ids of their tokens, sampling parameters.

A request keeps its row from join to leave. A batch is a list of request ids, so filtering and joining batches moves no
data. A request ends only when the router says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from text_generation_common.sampling import Sampling
from text_generation_server.device.transfers import send
from text_generation_server.errors import StepError
from text_generation_server.step.parameters import RowParameters

# The width of the rows' tensors is a multiple of this number of positions. Triton compiles a kernel for widths that 16
# divides and again for other widths, and a warm-up that lacks memory shortens the rows after kernels were compiled.
WIDTH_STEP = 128
NO_ADAPTER = -1
# `Rows.computed` reports rows that have at most this number of tokens together: 32 MiB of a message of 64 MiB.
MAX_REPORTED = 2**22
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A chunk of one request's history, as the router sends it. Only a request's first chunk has `ids`, `slots` and the
    fields after them.
    """

    request_id: int
    start: int
    end: int
    last: bool
    ids: Tensor | None = None  # int32 [history]
    slots: Tensor | None = None  # int32 [history]
    prompt_length: int = 0
    sampling: Sampling | None = None
    prompt_logprobs: int | None = None  # see `RowParameters`
    adapter: str = ""  # the digest of the adapter that changes the model for this request; "": none
    note: bytes = b""  # what the router wants to be told with the row, see `Rows.computed`; empty: nothing about it


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """The tokens of a row whose keys and values are computed, for a router that does not know the row."""

    note: bytes
    ids: Int32s
    slots: Int32s


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A batch that the shard holds, and those of its requests that a step carries."""

    id: int
    request_ids: list[int]


@dataclass(slots=True)
class Batch:
    """Requests that the router addresses together. A step need not carry all of them: requests whose prompt is still
    being computed, or that are about to leave, are missing from the step's list.
    """

    id: int
    request_ids: set[int]


class Rows:
    """Device state of up to `count` requests of up to `length` tokens each, and one extra row for padding, whose only
    token lies in `padding_slot`, the extra slot of the cache."""

    def __init__(
        self,
        count: int,
        length: int,
        device: torch.device,
        padding_slot: int = 0,
        adapter_slots: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`adapter_slots`: the slots of adapters by their digests."""
        self.count = count
        self.length = length
        self.device = device
        self.padding = count
        shape = (count + 1, -(-length // WIDTH_STEP) * WIDTH_STEP)
        self.table = torch.zeros(shape, dtype=torch.int32, device=device)  # slot of each position
        self.history = torch.zeros(shape, dtype=torch.int32, device=device)  # token id at each position
        # Number of tokens of each row whose ids are known. The keys of the newest one are computed by the next step.
        self.lengths = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.table[self.padding, 0] = padding_slot
        self.lengths[self.padding] = 1
        self.parameters = RowParameters(count)
        self.known = np.zeros(count, dtype=np.int64)  # a copy of `lengths` on the host
        # Number of first tokens of each row that were computed before it joined, or before its newest token.
        self.num_computed = np.zeros(count, dtype=np.int64)
        self.adapter_slots = adapter_slots
        self.adapters = np.full(count + 1, NO_ADAPTER, dtype=np.int32)  # the slot of each row's adapter
        self.changes = 0  # grows whenever a request joins, leaves or changes batches
        self._row_of: dict[int, int] = {}
        self._notes: dict[int, bytes] = {}  # by the request's id
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._row_of

    def row(self, request_id: int) -> int:
        try:
            return self._row_of[request_id]
        except KeyError:
            raise StepError(f"request {request_id} is not in this shard") from None

    def join(self, chunk: PromptChunk) -> int:
        """Takes a row for the first chunk of a request."""
        if chunk.ids is None or chunk.slots is None or chunk.sampling is None:
            raise StepError(f"request {chunk.request_id}: the first chunk has no ids, slots or parameters")
        history = len(chunk.ids)
        if len(chunk.slots) != history or not 0 < chunk.prompt_length <= history or history > self.length:
            raise StepError(
                f"request {chunk.request_id}: {history} ids do not fit {len(chunk.slots)} slots or the table"
            )
        if chunk.request_id in self._row_of or not self._free:
            raise StepError(f"request {chunk.request_id} has a row already, or all rows are taken")
        row = self._free.pop()
        self._row_of[chunk.request_id] = row
        self._notes[chunk.request_id] = chunk.note
        self.changes += 1
        self.known[row], self.num_computed[row] = history, chunk.start
        self.adapters[row] = self.adapter_slots[chunk.adapter] if chunk.adapter else NO_ADAPTER
        # The length is sent too: torch waits for a GPU before it writes a number of Python into one of its elements.
        parts = [chunk.slots.numpy(), chunk.ids.numpy(), np.array([history], dtype=np.int32)]
        slots, ids, length = send(parts, self.device)
        self.table[row, :history] = slots
        self.history[row, :history] = ids
        self.lengths[row : row + 1] = length
        self.parameters.set(row, chunk.sampling, chunk.prompt_length, chunk.prompt_logprobs)
        return row

    def ids(self, chunks: Sequence[PromptChunk]) -> list[int]:
        """The token ids of the chunks `chunks`, read back from the device."""
        return [i for c in chunks for i in self.history[self.row(c.request_id), c.start : c.end].tolist()]

    def note_tokens(self, rows_R: Int32s) -> None:
        """Counts one more token in each of the rows. A step has computed the tokens before, and appended this one on
        the device."""
        self.num_computed[rows_R] = self.known[rows_R]
        self.known[rows_R] += 1

    def computed(self) -> list[ComputedRow]:
        """What the rows with a note have in their slots; nothing if these have more than MAX_REPORTED tokens. Each step
        must have ended, with finite logits. Two rows may name one slot for different tokens: a router that preempts a
        request gives its slots away in a step before it drops the row. Then both rows must be told, or neither."""
        rows = [(self._notes[of], row, int(self.num_computed[row])) for of, row in self._row_of.items()]
        rows = [(note, row, count) for note, row, count in rows if note and count]
        if sum(count for *_, count in rows) > MAX_REPORTED:
            return []
        return [
            ComputedRow(note, *(part[row, :count].cpu().numpy().copy() for part in (self.history, self.table)))
            for note, row, count in rows
        ]

    def leave(self, request_id: int) -> None:
        self._free.append(self._row_of.pop(request_id))
        del self._notes[request_id]
        self.changes += 1

    def clear(self) -> None:
        for request_id in list(self._row_of):
            self.leave(request_id)


@dataclass(slots=True)
class Batches:
    """The batches of a shard by id, and the rows they name."""

    rows: Rows
    _by_id: dict[int, Batch] = field(default_factory=dict)

    def take(self, batch_id: int, request_ids: list[int]) -> Batch:
        """The batch `batch_id`, for a step that carries `request_ids`. StepError if one of these requests is not in the
        batch.
        """
        batch = self._by_id.get(batch_id)
        if batch is None or not batch.request_ids.issuperset(request_ids):
            raise StepError(f"batch {batch_id} with {len(request_ids)} requests is not what this shard holds")
        return batch

    def join(self, batch_id: int, request_ids: set[int]) -> Batch:
        """Adds requests to a batch, which is made if it does not exist."""
        batch = self._by_id.setdefault(batch_id, Batch(batch_id, set()))
        batch.request_ids |= request_ids
        return batch

    def merge(self, batch_ids: list[int]) -> Batch:
        """Joins the batches into the first batch of the list, which keeps its id."""
        first, *others = batch_ids
        for other in others:
            self.join(first, self._by_id.pop(other).request_ids)
            self.rows.changes += 1
        return self._by_id[first]

    def filter(self, batch_id: int, keep: list[int]) -> Batch:
        if not keep:
            raise StepError(f"batch {batch_id}: a filter must keep at least one request; ClearCache keeps none")
        batch = self.take(batch_id, keep)
        for request_id in batch.request_ids.difference(keep):
            self.rows.leave(request_id)
        batch.request_ids = set(keep)
        return batch

    def clear(self, batch_id: int | None) -> None:
        """Forgets one batch, or all rows if `batch_id` is None. An unknown id is not an error: the batch has gone."""
        if batch_id is None:
            self.rows.clear()
            self._by_id.clear()
        elif batch := self._by_id.pop(batch_id, None):
            for request_id in batch.request_ids:
                self.rows.leave(request_id)
