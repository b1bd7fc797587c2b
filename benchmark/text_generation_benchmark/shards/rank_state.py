"""Reads each rank's number of its last step without running a step. The benchmark continues with the next number."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import grpc

from text_generation_proto import generate_pb2 as pb
from text_generation_proto import generate_pb2_grpc as pb_grpc
from text_generation_router.errors import ShardsError

ANSWER_S = 10.0
QUIET_S = 0.2  # seconds; a router under load runs many steps in this time


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank: the numbers of its steps and of its slots."""

    epoch: int
    last_step: int
    running_step: int  # number of the step; 0: no step is running
    slots: int  # number of slots of the KV cache; 0: the shard is not warmed up yet


async def read_rank_states(master_uds_path: str) -> list[RankState]:
    """The states of all ranks, in order of rank. ShardsError if one does not answer."""
    if not Path(master_uds_path).exists():
        raise ShardsError(
            f"there is no shard at {master_uds_path}: start text-generation-launcher, and pass its --port here, or its"
            " --shard-uds-path with -0 at the end as --master-shard-uds-path"
        )
    try:
        async with grpc.aio.insecure_channel(f"unix://{master_uds_path}") as channel:
            stub = pb_grpc.TextGenerationServiceStub(channel)
            urls = (await stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=ANSWER_S)).urls
        return [await _read(url) for url in urls]
    except grpc.aio.AioRpcError as error:
        raise ShardsError(
            f"the shards of {master_uds_path} do not answer ({error.details()}): wait until the server is ready"
        ) from None


async def _read(url: str) -> RankState:
    async with grpc.aio.insecure_channel(url) as channel:
        stub = pb_grpc.TextGenerationServiceStub(channel)
        health = await stub.Health(pb.HealthRequest(), timeout=ANSWER_S)
        info = await stub.Info(pb.InfoRequest(), timeout=ANSWER_S)
    return RankState(health.epoch, health.last_step, health.running_step, info.slots)


async def find_idle(master_uds_path: str) -> list[RankState]:
    """The states of all ranks, all at the same step. ShardsError if the shards are not warmed up, or run steps now."""
    before = await read_rank_states(master_uds_path)
    if not all(state.slots for state in before):
        raise ShardsError(
            "the shards have had no warm-up, which is the router's task: start text-generation-launcher, and run this"
            " when it is ready"
        )
    await asyncio.sleep(QUIET_S)
    states = await read_rank_states(master_uds_path)
    positions = {(state.epoch, state.last_step) for state in states}
    if states != before or len(positions) > 1 or any(state.running_step for state in states):
        raise ShardsError(
            "the shards are busy: stop sending requests to their router, and run this when all have been answered"
        )
    return states
