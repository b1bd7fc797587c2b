"""Messages about replicas on the line between launcher and front."""

from text_generation_common.autoscaling import Demand
from text_generation_common.deployment import ReplicaNote, ReplicaReport, ReplicaState
from text_generation_common.link import LinkEvent, LinkMessage

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
        LinkMessage(LinkEvent.LISTENING, address="10.0.0.3:9000"),
    ):
        assert LinkMessage.from_line(message.line()) == message


def test_fronts_connect_to_replicas_that_have_an_address() -> None:
    assert DEPLOYMENT.endpoints == ("unix:///a", "10.0.0.3:9000")
    assert [DEPLOYMENT.count(state) for state in ReplicaState] == [0, 0, 2, 0, 1]
