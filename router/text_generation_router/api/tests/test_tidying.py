import asyncio

from text_generation_router.offload.malloc import Tidying


async def test_memory_is_given_back_after_the_last_of_several_pieces_of_work() -> None:
    given: list[str] = []
    at_work: list[str] = []
    tidying, done = Tidying(lambda: given.append("".join(at_work)), [0.0]), asyncio.Event()

    async def work(name: str) -> None:
        with tidying.after():
            at_work.append(name)
            await done.wait()
            at_work.remove(name)

    with tidying.after():
        pass
    tasks = [asyncio.create_task(work(name)) for name in "ab"]
    await asyncio.sleep(0.05)
    assert given == [], "others are at work"
    done.set()
    await asyncio.gather(*tasks)
    while not given:
        await asyncio.sleep(0.001)
    assert given == [""]


async def test_memory_is_given_back_again_later() -> None:
    given: list[None] = []
    with Tidying(lambda: given.append(None), [0.0, 0.001]).after():
        pass
    while len(given) < 2:
        await asyncio.sleep(0.001)
