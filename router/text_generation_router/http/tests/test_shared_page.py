import asyncio
from itertools import count

import pytest

from text_generation_router.api.service import SharedPage


def counted_page(gap_s: float) -> SharedPage:
    numbers = count(1)

    async def make() -> str:
        return str(next(numbers))

    return SharedPage(make, gap_s)


async def test_requests_that_wait_together_get_one_page_and_later_ones_a_later_page() -> None:
    page = counted_page(gap_s=0.01)
    first = await asyncio.gather(*(page.read() for _ in range(5)))
    second = await asyncio.gather(*(page.read() for _ in range(3)))
    assert [*first, *second] == ["1"] * 5 + ["2"] * 3


async def test_the_first_page_does_not_wait_and_the_next_one_comes_after_the_gap() -> None:
    page = counted_page(gap_s=60.0)
    await asyncio.wait_for(page.read(), 10)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(page.read(), 0.05)


async def test_a_cancelled_request_does_not_cancel_the_page_of_others() -> None:
    page = counted_page(gap_s=0.0)
    leaving, staying = asyncio.create_task(page.read()), asyncio.create_task(page.read())
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == "1"


async def test_a_page_that_cannot_be_made_fails_its_readers_only() -> None:
    pages = iter([None, "page"])

    async def make() -> str:
        if (page := next(pages)) is None:
            raise ValueError("no page")
        return page

    page = SharedPage(make, gap_s=0.0)
    with pytest.raises(ValueError, match="no page"):
        await page.read()
    assert await page.read() == "page"
