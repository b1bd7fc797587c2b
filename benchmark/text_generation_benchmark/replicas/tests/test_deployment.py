"""Simulated deployments: which policy finds more in caches, and that no request is lost with an engine."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from text_generation_benchmark.cli import app
from text_generation_benchmark.replicas.chats import ChatLoad, Chats, day_arrivals, steady_arrivals
from text_generation_benchmark.replicas.deployment import Deployment, FleetPlan, ReplicaLoss
from text_generation_benchmark.replicas.fleet import ReplicaScaler, ScalingPlan
from text_generation_benchmark.replicas.front import HASHER, NAMESPACE, Policy
from text_generation_benchmark.simulation.cost import MODELS
from text_generation_common.autoscaling import ScalingPace
from text_generation_router.fleet.cache_news import BLOCK_TOKENS, HistoryHashes
from text_generation_router.scheduling.request import Limits

CHATS = ChatLoad(num_systems=6, num_chats=60)
PLAN = FleetPlan(
    CHATS, steady_arrivals(35, 12, 0), MODELS["h200-8b"], Limits(60_000, 128, 4096), Policy.SCORE, num_fronts=2
)


def simulate(plan: FleetPlan) -> Deployment:
    deployment = Deployment(plan)
    deployment.run()
    assert len(deployment.done) == len(plan.arrivals_s)
    return deployment


def cached(deployment: Deployment) -> float:
    return deployment.cached_tokens / deployment.prompt_tokens


def end_s(deployment: Deployment) -> float:
    return max(sent.progress.last_s for sent in deployment.done)


@pytest.mark.parametrize("num_fronts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_score_finds_more_of_chats_in_caches_than_policies_that_do_not_look(num_fronts: int) -> None:
    found = {policy: cached(simulate(replace(PLAN, policy=policy, num_fronts=num_fronts))) for policy in Policy}
    assert found[Policy.SCORE] > 0.1 + max(found[Policy.ROUND_ROBIN], found[Policy.LEAST_REQUESTS])


def test_where_prompts_share_nothing_the_score_takes_no_longer_than_round_robin() -> None:
    plan = replace(PLAN, load=replace(CHATS, shares=False))
    turn, score = (simulate(replace(plan, policy=policy)) for policy in (Policy.ROUND_ROBIN, Policy.SCORE))
    assert cached(turn) == cached(score) == 0.0 and end_s(score) < 1.1 * end_s(turn)


def test_requests_of_a_lost_engine_end_on_the_others_and_fronts_know_every_cache() -> None:
    deployment = simulate(replace(PLAN, losses=[ReplicaLoss(3.0, 9.0, 1, 2)]))
    assert deployment.num_resumed > 0
    one_step_s = 0.2
    last_s = [sent.progress.last_s for sent in deployment.done if sent.engine == 1]
    assert not any(3.0 + one_step_s < each < 9.0 for each in last_s)
    for front in deployment.fronts:
        for engine, replica in enumerate(deployment.replicas):
            assert replica is not None
            for number, news in enumerate(replica.log.take(), 1):
                assert front.index.take(engine, front._sequences[engine] + number, news)
        front.tick(1e9)
        break  # news can be taken once
    front = deployment.fronts[0]
    prompts = [sent.turn.prompt.array for sent in deployment.done[-40:]]
    for engine, replica in enumerate(deployment.replicas):
        assert replica is not None
        cache = replica.engine.scheduler.memory.cache
        for prompt in prompts:
            hashes = HistoryHashes(HASHER, NAMESPACE, prompt).hashes
            assert front.index.matched_by(engine, hashes) == cache.match(NAMESPACE, prompt) // BLOCK_TOKENS


def test_queued_requests_move_to_an_engine_that_has_come_back() -> None:
    plan = replace(PLAN, arrivals_s=steady_arrivals(70, 8, 0), losses=[ReplicaLoss(1.0, 5.0, 0, 3)])
    assert simulate(plan).num_moves > 0 and simulate(replace(plan, moves=False)).num_moves == 0


def test_a_chat_goes_on_with_its_answer() -> None:
    chats = Chats(replace(CHATS, num_chats=1), 0)
    before = chats.next()
    chats.answered(before)
    after = chats.next()
    made = after.prompt.tuple[len(before.prompt) : len(before.prompt) + before.output_tokens]
    assert after.prompt.tuple[: len(before.prompt)] == before.prompt.tuple and len(set(made[:-1])) <= 1
    assert after.prompt.array.tolist() == list(after.prompt.tuple)


def test_a_day_has_its_peaks_at_eleven_and_twenty() -> None:
    arrivals_s = day_arrivals(100, 240, 0)
    per_hour, _ = np.histogram(arrivals_s, bins=24, range=(0, 240))
    assert len(arrivals_s) == pytest.approx(24_000, rel=0.05)
    assert per_hour[3] < 600 < 1500 < min(per_hour[11], per_hour[20]) and per_hour[15] < 1300


def test_the_commands_print_a_table() -> None:
    small = ["--rate", "10", "--policy", "score", "--fronts", "1"]
    result = CliRunner().invoke(app, ["replicas", *small, "--duration", "3", "--apart"])
    assert result.exit_code == 0 and "| score  | 1      |" in result.output
    result = CliRunner().invoke(app, ["fleet", *small, "--engines", "3", "--day-seconds", "24", "--messages", "50"])
    assert result.exit_code == 0 and "to choose an engine" in result.output
    assert "messages a second to 1 fronts" in result.output


def test_replicas_that_follow_the_load_come_go_and_lose_no_request() -> None:
    arrivals_s = np.concatenate([steady_arrivals(40, 9, 0), 9 + steady_arrivals(2, 20, 1)])
    pace = ScalingPace(up_s=1.0, down_s=3.0, smooth_s=2.0)
    plan = replace(PLAN, arrivals_s=arrivals_s, num_engines=3)
    scaler = ReplicaScaler(plan, ScalingPlan(1, 3, 1.0, pace))
    scaler.deployment.run()
    assert len(scaler.deployment.done) == len(arrivals_s)
    assert scaler.most == 3 and min(scaler.changes) == -1
    assert 29 < scaler.replica_s < 3 * 35


def test_the_command_compares_fixed_numbers_with_one_that_follows_the_load() -> None:
    small = ["--most", "2", "--always", "1", "--start-seconds", "5", "--rate", "0.5", "--day-seconds", "60"]
    result = CliRunner().invoke(app, ["autoscaling", *small])
    assert result.exit_code == 0 and "| 1 always" in result.output and "| 1 to 2, start 5 s |" in result.output
