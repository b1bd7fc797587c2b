import asyncio

import pytest

from text_generation_router.http.encoding import ROWS_PER_PIECE, rows_json, to_json

SIZES = (0, 1, ROWS_PER_PIECE - 1, ROWS_PER_PIECE, ROWS_PER_PIECE + 1, 3 * ROWS_PER_PIECE)


@pytest.mark.parametrize("size", SIZES)
def test_an_array_encoded_in_pieces_equals_the_array_encoded_at_once(size):
    rows = [{"id": number, "text": f'"{number}'} for number in range(size)]
    assert to_json({"rows": asyncio.run(rows_json(rows, dict))}) == to_json({"rows": rows})


async def test_other_tasks_run_between_two_pieces():
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await rows_json(range(10 * ROWS_PER_PIECE), str)
    task.cancel()
    assert turns >= 9
