"""Permits for generations, one per row of the shards: decides which request is refused when there are more requests
than rows.

Owners (API keys or client addresses) that hold permits have equal shares of all permits; the tenants of one owner have
equal shares of the owner's permits. While permits are left, every request gets its permits. When none is left, only a
tenant below its share gets more. To make room for it, requests of the owner or tenant most above its share are refused:
the newest requests that have not begun. If all requests have begun, none is refused: the new request waits in the
queue, which frees a row for a tenant that has no row.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from text_generation_router.errors import InferenceError, OverloadedError
from text_generation_router.scheduling.request import Share

# Limit on permits given out, in multiples of the number of rows. At this limit a tenant below its share is refused too.
MAX_OUT = 2

T = TypeVar("T")


class Refusable(Protocol):
    """A generation that was submitted to the engine and can still be refused."""

    @property
    def has_begun(self) -> bool: ...

    def refuse(self, error: InferenceError) -> None:
        """Ends the generation; its reader gets `error`."""


class Permit:
    """The permits of one HTTP request, which must always be returned. A permit that is returned twice counts once."""

    def __init__(self, permits: "Permits", share: Share, count: int) -> None:
        self.share = share
        self.left = count
        self._permits = permits
        self._generations: Sequence[Refusable] = ()
        self._is_begun = False
        self._work: asyncio.Future[Any] | None = None
        self._refusal: InferenceError | None = None

    @property
    def has_begun(self) -> bool:
        return self._is_begun or any(generation.has_begun for generation in self._generations)

    def begin(self) -> None:
        """Marks work that is not a generation as begun: it can no longer be refused."""
        self._is_begun = True

    async def unless_refused(self, work: Awaitable[T]) -> T:
        """Runs `work`, which prepares the generations. If another request takes the permits, `work` is cancelled and
        the refusal is raised.
        """
        task = asyncio.ensure_future(work)
        self._work = task
        try:
            result = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._refusal is None or (current is not None and current.cancelling()):
                raise
            raise self._refusal from None
        finally:
            self._work = None
        if self._refusal is not None:  # the refusal came too late to cancel `work`
            raise self._refusal
        return result

    def submitted(self, generations: Sequence[Refusable]) -> None:
        self._generations = generations

    def give_back(self, count: int) -> None:
        given = min(count, self.left)
        self.left -= given
        self._permits.returned(self, given)

    def refuse(self, error: InferenceError) -> None:
        """Takes all permits back, for another request, and ends this request's work with `error`."""
        self._refusal = error
        self.give_back(self.left)
        if self._work is not None:
            self._work.cancel()
        for generation in self._generations:
            generation.refuse(error)


class PermitHolder:
    """An owner, or one of its tenants, that holds permits."""

    def __init__(self) -> None:
        self.held = 0
        self.tenants: dict[str, PermitHolder] = {}  # tenants of an owner, by name
        self.permits: dict[Permit, None] = {}  # permits of a tenant, in order of arrival


class Permits:
    """All permits. `capacity` returns their number, which may change. `retry_after_s` returns the seconds after which a
    request that is refused now is worth sending again. `elsewhere` returns the number of permits that other processes
    hold.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        retry_after_s: Callable[[], int],
        elsewhere: Callable[[], int] = lambda: 0,
    ) -> None:
        self._capacity_now = capacity
        self._retry_after_s = retry_after_s
        self._elsewhere = elsewhere
        self._out = 0
        self._owners: dict[str, PermitHolder] = {}

    @property
    def _capacity(self) -> int:
        return self._capacity_now()

    @property
    def left(self) -> int:
        """Number of permits left. Negative if tenants below their shares got permits beyond the capacity, or if the
        capacity has become smaller."""
        return self._capacity - self._all_out

    @property
    def _all_out(self) -> int:
        return self._out + self._elsewhere()

    def take(self, share: Share, count: int) -> Permit:
        """Permits for `count` generations of one HTTP request. Raises OverloadedError."""
        if count > self.left and not self._makes_room(share, count):
            raise OverloadedError(self._retry_after_s())
        owner = self._owners.setdefault(share.owner, PermitHolder())
        tenant = owner.tenants.setdefault(share.tenant, PermitHolder())
        permit = Permit(self, share, count)
        tenant.permits[permit] = None
        self._count(owner, tenant, count)
        return permit

    def returned(self, permit: Permit, count: int) -> None:
        """Takes back `count` permits. Only Permit calls this method."""
        if not count:
            return
        owner = self._owners[permit.share.owner]
        tenant = owner.tenants[permit.share.tenant]
        self._count(owner, tenant, -count)
        if not permit.left:
            del tenant.permits[permit]
        if not tenant.permits:
            del owner.tenants[permit.share.tenant]
        if not owner.tenants:
            del self._owners[permit.share.owner]

    def _count(self, owner: PermitHolder, tenant: PermitHolder, count: int) -> None:
        owner.held += count
        tenant.held += count
        self._out += count

    def _makes_room(self, share: Share, count: int) -> bool:
        """Whether the owner and tenant `share` get `count` permits although fewer are left. Other requests may be
        refused to make room.
        """
        # Requests of other processes belong to tenants that are not known here, so only the permits that they do not
        # hold are shared out: at least one, so that no tenant waits for ever.
        own = max(1, self._capacity - self._elsewhere())
        if count > own:
            return False
        owner = self._owners.get(share.owner) or PermitHolder()
        tenant = owner.tenants.get(share.tenant) or PermitHolder()
        owners_share = max(1, own // (len(self._owners) + (owner.held == 0)))
        if _is_below(owner, owners_share, count):
            self._refuse(count, self._owners, owners_share)
            return self._all_out + count <= MAX_OUT * self._capacity
        tenants_share = max(1, owners_share // (len(owner.tenants) + (tenant.held == 0)))
        if _is_below(tenant, tenants_share, count):
            self._refuse(count, owner.tenants, tenants_share)
            return owner.held + count <= MAX_OUT * owners_share and self._all_out + count <= MAX_OUT * self._capacity
        return False

    def _refuse(self, count: int, holders: Mapping[str, PermitHolder], share: int) -> None:
        """Refuses requests of those `holders` that hold more than `share`, until `count` permits have room or all
        these requests have begun."""
        missing = min(count, count - self.left)
        while missing > 0 and (permit := _newest_not_begun(holders, share)) is not None:
            missing -= permit.left
            permit.refuse(OverloadedError(self._retry_after_s()))


def _is_below(holder: PermitHolder, share: int, count: int) -> bool:
    return holder.held == 0 or holder.held + count <= share


def _newest_not_begun(holders: Mapping[str, PermitHolder], share: int = 0) -> Permit | None:
    """The newest permit whose generation has not begun, of the holder that has the most permits and more than `share`.
    If all its permits have begun: of the holder with the next most permits."""
    above = (holder for holder in holders.values() if holder.held > share)
    for holder in sorted(above, key=lambda holder: holder.held, reverse=True):
        own = (permit for permit in reversed(holder.permits) if not permit.has_begun)
        if (found := next(own, None) or _newest_not_begun(holder.tenants)) is not None:
            return found
    return None
