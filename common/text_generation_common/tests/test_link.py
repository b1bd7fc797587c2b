"""The line between launcher and router."""

import asyncio
import socket

from text_generation_common.link import Link, LinkEvent, LinkMessage


def test_the_last_messages_of_an_ended_process_are_received_after_a_failed_send() -> None:
    async def run() -> list[LinkMessage | None]:
        ours, theirs = socket.socketpair()
        link = await Link.open(ours)
        theirs.send(b'{"event": "listening", "epoch": 0, "reason": ""}\n')
        theirs.close()
        for epoch in range(3):
            link.send(LinkMessage(LinkEvent.READY, epoch))
        await asyncio.sleep(0)
        heard = [await asyncio.wait_for(link.receive(), 10) for _ in range(2)]
        link.close()
        return heard

    assert asyncio.run(run()) == [LinkMessage(LinkEvent.LISTENING), None]


def test_a_line_that_is_closed_has_ended_for_the_other_process() -> None:
    async def run() -> LinkMessage | None:
        ours, theirs = socket.socketpair()
        link, other = await Link.open(ours), await Link.open(theirs)
        link.close()
        try:
            return await asyncio.wait_for(other.receive(), 10)
        finally:
            other.close()

    assert asyncio.run(run()) is None


def test_messages_that_are_not_read_do_not_block_the_sender() -> None:
    async def run() -> bytes:
        ours, theirs = socket.socketpair()
        link = await Link.open(ours)
        for _ in range(20_000):
            link.send(LinkMessage(LinkEvent.LOST, 7, "x" * 100))
        read = theirs.recv(1 << 20)
        link.close()
        theirs.close()
        return read

    read = asyncio.run(run())
    assert read.startswith(b'{"event": "lost"') and read.count(b"\n") < 20_000
