"""Ray's head is lost for minutes, with 64 streams: `make test-cluster ARGS="--faults 0 --head-minutes 5"`."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cluster_record
from cluster_ray import RayDeployment
from cluster_ray_faults import RayInjector
from cluster_record import ClusterResult
from cluster_streams import answers_meanwhile, ask_again
from mixed import MixedAnswer, MixedAsk
from server_process import wait_until

LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class HeadLost:
    minutes: float
    whole_s: float  # seconds from the start of the new head to a deployment that is whole, and has all nodes
    replaced_s: float  # seconds in which the new head then had a replica replaced whose launcher was killed
    found: ClusterResult


def lose_head(
    deployment: RayDeployment,
    minutes: float,
    asked: Sequence[MixedAsk],
    expected: Sequence[MixedAnswer],
    note: Callable[[str], None],
) -> HeadLost:
    times: list[float] = []

    def hurt() -> None:
        deployment.kill_head()
        note(f"the head is dead for {minutes:g} minutes")
        time.sleep(60 * minutes)
        deployment.start_head()
        began_s = time.monotonic()
        deployment.until_whole()
        times.append(time.monotonic() - began_s)
        note(f"whole {times[-1]:.1f} s after the start of the head")
        before, began_s = set(deployment.report().endpoints), time.monotonic()
        RayInjector(deployment, random.Random(1)).inject("launcher killed")
        wait_until(
            lambda: set(deployment.report().endpoints) != before, LIMIT_S, "Ray notices that a replica has ended"
        )
        deployment.until_whole()
        times.append(time.monotonic() - began_s)
        note(f"a replica whose launcher was killed is replaced within {times[-1]:.1f} s")

    answers = answers_meanwhile(deployment.url, asked, hurt)
    different = ask_again(deployment.url, asked, answers)
    found = cluster_record.result(0, [], deployment.notices(), asked, expected, answers, different)
    return HeadLost(minutes, times[0], times[1], found)


def as_table(lost: HeadLost) -> str:
    found = lost.found
    head = "| head away, min | streams | lost | different | whole after, s | then a lost replica replaced after, s |"
    cells = [f"{lost.minutes:g}", found.streams, len(found.lost), len(found.different)]
    cells += [f"{lost.whole_s:.1f}", f"{lost.replaced_s:.1f}"]
    return "\n".join([head, "| --- | --- | --- | --- | --- | --- |", "| " + " | ".join(map(str, cells)) + " |"])
