import asyncio

from text_generation_router.offload.pool import Job, Waiting


def jobs(*names: str) -> list[Job]:
    """Jobs with the given names. The first letter of a name is the job's tenant."""
    loop = asyncio.new_event_loop()
    try:
        return [Job(name, b"", name[0], 1.0, loop.create_future()) for name in names]
    finally:
        loop.close()


def names(waiting: Waiting) -> str:
    return " ".join(job.name for job in iter(waiting.take, None))


def test_tenants_take_turns_and_each_ones_jobs_keep_their_order():
    waiting = Waiting(9)
    assert [waiting.put(job) for job in jobs("a1", "a2", "a3", "b1", "c1", "b2")] == [None] * 6
    assert names(waiting) == "a1 b1 c1 a2 b2 a3"
    assert len(waiting) == 0


def test_where_there_is_no_room_the_newest_of_the_greediest_tenant_goes():
    waiting = Waiting(3)
    a1, a2, a3, b1, b2 = jobs("a1", "a2", "a3", "b1", "b2")
    assert [waiting.put(job) for job in (a1, a2, a3)] == [None] * 3
    assert waiting.put(b1) is a3
    assert waiting.put(b2) is b2  # tenants a and b have two jobs each, so the new job is refused
    assert len(waiting) == 3 and names(waiting) == "a1 b1 a2"


def test_a_job_that_is_taken_back_waits_no_more():
    waiting = Waiting(3)
    a1, a2, b1 = jobs("a1", "a2", "b1")
    for job in (a1, a2, b1):
        waiting.put(job)
    assert waiting.remove(a1) and not waiting.remove(a1)
    assert waiting.remove(b1) and names(waiting) == "a2"
