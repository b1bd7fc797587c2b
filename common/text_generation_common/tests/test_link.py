"""The line between launcher and router."""

import asyncio
import socket
from math import inf

import pytest

from text_generation_common.autoscaling import Demand
from text_generation_common.json_values import as_json, from_fields, from_json
from text_generation_common.link import Link, LinkEvent, LinkMessage, ReplicaNote, ReplicaReport, ReplicaState


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
    assert read.startswith(b'{"event":"lost"') and read.count(b"\n") < 20_000


# Messages about replicas on the line between launcher and front.
DEPLOYMENT = ReplicaReport(
    3,
    (
        ReplicaNote("Replica 0", ReplicaState.READY, "unix:///a"),
        ReplicaNote("Replica 1", ReplicaState.FAILED, reason="its card is broken"),
        ReplicaNote("Replica 2", ReplicaState.READY, "10.0.0.3:9000"),
    ),
)


def test_messages_about_replicas_arrive_as_they_were_sent() -> None:
    for message in (
        LinkMessage(LinkEvent.ENGINES, deployment=DEPLOYMENT),
        LinkMessage(LinkEvent.SCALE, replicas=3),
        LinkMessage(LinkEvent.SCALED, reason="no"),
        LinkMessage(LinkEvent.DEMAND, demand=Demand(0.25, 7, 0.5)),
        LinkMessage(LinkEvent.DEMAND, demand=Demand(inf, 7)),
        LinkMessage(LinkEvent.LISTENING, address="10.0.0.3:9000"),
    ):
        assert from_json(LinkMessage, as_json(message)) == message


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (b"x", "JSON"),
        (b"[]", "object"),
        (b"{}", "event"),
        (b'{"event": "moved"}', "event"),
        (b'{"event": "scale", "replicas": "all"}', "replicas"),
        (b'{"event": "demand", "demand": {"wait_s": 1.0}}', "demand.requests"),
    ],
)
def test_a_line_that_is_not_a_message_is_refused_in_one_line_that_names_the_field(line: bytes, names: str) -> None:
    with pytest.raises(ValueError, match=names) as refused:
        from_json(LinkMessage, line)
    assert "\n" not in str(refused.value)


def test_what_the_control_socket_answers_is_read_as_the_report_that_was_given() -> None:
    assert from_fields(ReplicaReport, DEPLOYMENT.as_json() | {"num_requests": 7}) == DEPLOYMENT
    with pytest.raises(ValueError, match=r"replicas.0.state"):
        from_fields(ReplicaReport, {"wanted": 1, "replicas": [{"name": "a", "state": "asleep"}]})


def test_fronts_connect_to_replicas_that_have_an_address() -> None:
    assert DEPLOYMENT.endpoints == ("unix:///a", "10.0.0.3:9000")
    assert [DEPLOYMENT.count(state) for state in ReplicaState] == [0, 0, 2, 0, 1]
