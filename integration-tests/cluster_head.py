"""The head of Ray is lost for minutes, with 64 streams meanwhile: `make test-cluster ARGS="--ray --head-minutes 5"`."""

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


@dataclass(frozen=True, slots=True)
class HeadLost:
    minutes: float
    whole_s: float  # seconds from the start of the new head to a deployment that is whole, and has all nodes
    replaced_s: float  # seconds in which the new head then had a killed engine replaced
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
        times.append(until_whole(deployment))
        note(f"whole {times[-1]:.1f} s after the start of the head")
        RayInjector(deployment, random.Random(1)).inject("engine killed")
        times.append(until_whole(deployment))
        note(f"a killed engine is replaced within {times[-1]:.1f} s")

    answers = answers_meanwhile(deployment.url, asked, hurt)
    different = ask_again(deployment.url, asked, answers)
    found = cluster_record.result(0, [], deployment.notices(), asked, expected, answers, different)
    return HeadLost(minutes, times[0], times[1], found)


def until_whole(deployment: RayDeployment) -> float:
    """Waits until the deployment is whole, and returns the seconds that it took."""
    began_s = time.monotonic()
    deployment.until_whole()
    return time.monotonic() - began_s


def as_table(lost: HeadLost) -> str:
    found = lost.found
    head = "| head away, min | streams | lost | different | whole after, s | then an engine replaced after, s |"
    cells = [f"{lost.minutes:g}", found.streams, len(found.lost), len(found.different)]
    cells += [f"{lost.whole_s:.1f}", f"{lost.replaced_s:.1f}"]
    return "\n".join([head, "| --- | --- | --- | --- | --- | --- |", "| " + " | ".join(map(str, cells)) + " |"])
