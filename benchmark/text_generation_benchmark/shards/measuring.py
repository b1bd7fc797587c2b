"""All rounds of the shard benchmark, with a line on stderr after each."""

from text_generation_benchmark.output import say
from text_generation_benchmark.shards.config import Plan, ShardBenchmarkConfig
from text_generation_benchmark.shards.prompt import prompt_ids
from text_generation_benchmark.shards.rounds import open_benchmark
from text_generation_benchmark.shards.statistics import Results, Round


async def measure(config: ShardBenchmarkConfig, plan: Plan) -> Results:
    """Runs all rounds. Raises StartError and ShardsError."""
    ids = await prompt_ids(config.tokenizer_name, config.revision, plan.sequence_length)
    results = Results(plan.batch_sizes, plan.rounds_each)
    async with open_benchmark(config.master_shard_uds_path, plan, ids) as benchmark:
        await benchmark.measure(lambda done: report(results, done))
    return results


def report(results: Results, done: Round) -> None:
    """Writes one line for each round."""
    results.add(done)
    number = f"{results.finished[done.batch_size]}/{results.rounds_each}"
    what = "warm-up" if done.is_warmup else "run"
    say(
        f"batch size {done.batch_size}, round {number} ({what}):"
        f" prefill {done.prefill_ms:.2f} ms, decode {done.decode_ms:.2f} ms, {done.token_ms:.2f} ms a token"
    )
