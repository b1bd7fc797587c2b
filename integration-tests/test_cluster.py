"""The short form of `make test-cluster`: two replicas on machines of their own are lost, under streams."""

import random
from collections.abc import Iterator
from functools import partial

import machines
import pytest
from cluster import DeploymentByHand
from cluster_faults import Injector
from machines import Network
from scale import SHORT
from streams import StreamAnswer, compare

# A machine is lost after seconds of silence.
pytestmark = pytest.mark.alone
EIGHTH = SHORT.num_streams * SHORT.new_tokens // 8
ALWAYS = ("--dtype", "float32", "--json-output", "--num-shard", "1")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentByHand]:
    if not machines.can_be_made():
        pytest.skip(machines.WITHOUT)
    folder = tmp_path_factory.mktemp("cluster")
    with Network(3) as network, DeploymentByHand(network, folder, (*ALWAYS, *SHORT.arguments)) as deployment:
        yield deployment


def test_no_stream_notices_that_replicas_are_lost(deployment: DeploymentByHand, one_shard: list[StreamAnswer]) -> None:
    injector = Injector(deployment, random.Random(1))
    for kind in ("power lost", "engine killed", "partition"):
        answers, _ = SHORT.beside(deployment.url, partial(injector.inject, kind), EIGHTH)
        assert compare(one_shard, answers).failures() == [], kind
