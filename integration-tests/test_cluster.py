"""The short form of `make test-cluster`: two replicas on machines of their own are lost, under streams."""

import asyncio
import random
from collections.abc import Callable, Iterator
from functools import partial

import machines
import pytest
from cluster_by_hand import DeploymentByHand
from cluster_faults import ClusterFault, Injector
from machines import Network
from scale import SHORT
from streams import StreamAnswer, StreamClients, compare, run_streams

# A machine is lost after seconds of silence.
pytestmark = pytest.mark.alone
ALWAYS = ("--dtype", "float32", "--json-output", "--num-shard", "1")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentByHand]:
    if not machines.can_be_made():
        pytest.skip(machines.WITHOUT)
    folder = tmp_path_factory.mktemp("cluster")
    with Network(3) as network, DeploymentByHand(network, folder, (*ALWAYS, *SHORT.arguments)) as deployment:
        yield deployment


def streams_beside(deployment: DeploymentByHand, inject: Callable[[], ClusterFault]) -> list[StreamAnswer]:
    """The answers to SHORT's streams, during which a fault is injected."""

    async def meanwhile(clients: StreamClients) -> None:
        await clients.wait_for_tokens(SHORT.num_streams * SHORT.new_tokens // 8)
        await asyncio.to_thread(inject)

    answers, _ = run_streams(deployment.url, SHORT.asks(), SHORT.num_streams, meanwhile)
    return answers


def test_no_stream_notices_that_replicas_are_lost(deployment: DeploymentByHand, one_shard: list[StreamAnswer]) -> None:
    injector = Injector(deployment, random.Random(1))
    for kind in ("power lost", "engine killed", "partition"):
        answers = streams_beside(deployment, partial(injector.inject, kind))
        assert str(compare(one_shard, answers)) == str(compare(one_shard, one_shard)), kind
