"""Computes hashes of all answers of a server, and counts of its work: `make digest`, before and after a change that
must alter neither.

Requests in float32 are sent to servers of 1 and 2 shards in several runs. Two runs send the same 500 mixed requests,
with too few token slots for 32 of them:

- *the storm*: 32 at a time, and a shard is killed half-way. Its counts depend on the arrival of requests.
- *the line*: all requests wait in the queue, in a known order, before the first step. Nothing arrives later, no request
  pauses for its client, no text depends on a seed that the server draws, and no chunk is cut by what steps have cost in
  seconds (`--max-prefill-slowdown 0`). So each step is decided from the same state in every run, and the counts of
  steps, rows and preemptions must be equal.
- *the options*: 16 requests, one after the other, with the options and routes that the mixed requests do not have.

The digest of these covers every event of every stream (ids, texts, log-probabilities, top tokens, finish reasons);
storm and line must have the same digest. Two shards add numbers in another order than one, so they have another digest.

Four runs send requests one by one to a server of one shard, some seconds long each. Their digests cover statuses,
headers and bodies as they are sent, without ids and times:

- *routes*: each route, whole and streamed, with grammars of all kinds, tools, `n` and lists of prompts; /openapi.json,
  /info and the other pages.
- *dialect*: completions and chats of a server with `--tgi-dialect`.
- *calls*: three servers whose models write calls and reasoning as JSON, as XML and in channels, by three APIs; whole,
  cut by length and by stop strings.
- *refusals*: mistakes of each kind on each route, with a key and without.

`--launcher` measures the servers of other versions, in turns: digests, and the counts of the line, must be equal in all
of them. `--write FOLDER` writes the answers of these four runs into FOLDER/1, FOLDER/2 … (one folder for each
launcher), where `diff -r FOLDER/1 FOLDER/2` shows what has changed.

`--reference` computes with the reference kernels instead of compiled kernels: it copies the server's package without
the compiled kernels. Both kinds of kernels have the same digest only on processors where torch's products and ours
round alike. Exit status 1 if a request failed, a run had fewer than 21 preemptions, or values differ that must be
equal."""

import argparse
import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import digest_requests as requests
import httpx
import processes
import psutil
from asks import Ask
from calls import DEMO_MODEL, client_of, metric, metrics
from exchanges import Said, all_said
from server_process import LAUNCHER, ServerProcess, wait_until
from streams import STREAM_LIMIT_S, StreamAnswer, answer_of
from written import WritingServer

from text_generation_benchmark.metrics import metric as read_metric

AT_ONCE = 32
# Fewer token slots than 32 of these requests need, so that running requests are preempted.
ARGUMENTS = (
    *("--model-id", str(DEMO_MODEL)),
    *("--dtype", "float32", "--max-batch-total-tokens", "2560", "--max-batch-size", str(AT_ONCE)),
    *("--max-concurrent-requests", str(2 * requests.NUM_ASKS), "--max-queued-tokens", "1000000"),
)
# Chunks of prompts are cut by what is known of the seconds that steps take: the line's steps would depend on the clock.
UNTIMED = ("--max-prefill-slowdown", "0")
LIMIT_S = 120.0
MIXED_RUNS = ("storm", "line", "options")
ONE_SHARD = ("--model-id", str(DEMO_MODEL), "--dtype", "float32", "--max-batch-total-tokens", "8192")
# Arguments of the servers of the runs that send requests one by one.
SERVED: dict[str, tuple[str, ...]] = {
    "routes": (*ONE_SHARD, "--enable-prefill-logprobs"),
    "dialect": (*ONE_SHARD, "--enable-prefill-logprobs", "--tgi-dialect"),
    "calls": (),
    "refusals": (*ONE_SHARD, "--api-key", requests.KEY),
}
RUNS = (*MIXED_RUNS, *SERVED)
MIN_REFUSALS = 200
CROWDED = ("storm", "line")
MIN_PREEMPTIONS = 21


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of the work that the shards did in one run."""

    forwards: int
    rows: int  # number of rows of all forward steps: one for each request that decodes in a step
    prompt_tokens: int  # number of tokens that chunks computed; tokens of preempted requests count each time
    # Rows whose token is in no text; plus one for each request preempted before its prompt was computed.
    wasted_rows: int


@dataclass(frozen=True, slots=True)
class Digest:
    run: str
    num_shard: int
    kernels: str
    sha256: str
    answers: int
    preemptions: int
    failed: Sequence[str]
    work: Work | None = None  # None in runs other than the line, whose counts are not comparable

    def failures(self) -> list[str]:
        is_few = self.run in CROWDED and self.preemptions < MIN_PREEMPTIONS
        few = [f"{self.preemptions} preemptions only"] if is_few else []
        return [f"{self.run}, {self.num_shard} shards: {failure}" for failure in [*self.failed, *few]]


def differences(found: Sequence[Digest]) -> Iterator[str]:
    """A line for each value that should be equal in all runs with the same number of shards, and is not."""
    for num_shard in sorted({digest.num_shard for digest in found}):
        runs = [digest for digest in found if digest.num_shard == num_shard]
        if len({digest.sha256 for digest in runs if digest.run in CROWDED}) > 1:
            yield f"{num_shard} shards: storms and lines have different digests"
        for name in sorted({digest.run for digest in runs} - {*CROWDED}):
            if len({digest.sha256 for digest in runs if digest.run == name}) > 1:
                yield f"{num_shard} shards: the {name} have different digests"
        if len({(digest.work, digest.preemptions) for digest in runs if digest.run == "line"}) > 1:
            yield f"{num_shard} shards: the lines took different steps"


def storm(server: ServerProcess, num_shard: int) -> Digest:
    asked = requests.crowded_asks()
    answers = asyncio.run(_storm_answers(server, asked))
    failed = _failed(asked, answers)
    if processes.epoch(processes.shards(server.pid)[0]) < 2:
        failed.append("the kill came too late")
    return _digest(server, "storm", num_shard, asked, answers, failed)


def line(server: ServerProcess, num_shard: int, steps: Path) -> Digest:
    asked = [requests.with_one_outcome(replace(ask, is_slow=False)) for ask in requests.crowded_asks()]
    answers = asyncio.run(_line_answers(server, asked, num_shard))
    digest = _digest(server, "line", num_shard, asked, answers, _failed(asked, answers))
    length = "tgi_request_generated_tokens"
    tokens, texts = metrics(server.url, f"{length}_sum", f"{length}_count")
    loads = [json.loads(step) for step in steps.read_text().splitlines()]
    rows, prompt_tokens = (sum(load[name] for load in loads) for name in ("rows", "prompt_tokens"))
    # The first token of a text, and the first token after a preemption, come from a chunk and not from a row.
    wasted = rows + int(texts) + digest.preemptions - int(tokens)
    return replace(digest, work=Work(len(loads), rows, prompt_tokens, wasted))


def one_by_one(server: ServerProcess, num_shard: int) -> Digest:
    asked = list(requests.asks_for_options())

    async def answers() -> list[StreamAnswer]:
        async with client_of(server.url) as client:
            return [await answer_of(client, asked, place) for place in range(len(asked))]

    found = asyncio.run(answers())
    return _digest(server, "options", num_shard, asked, found, _failed(asked, found))


def _digest(
    server: ServerProcess,
    run: str,
    num_shard: int,
    asked: Sequence[Ask],
    answers: Sequence[StreamAnswer],
    failed: Sequence[str],
) -> Digest:
    # Texts of best_of depend on seeds that the server draws, and completions name the model's folder: both are left
    # out.
    said = [event for answer in answers if asked[answer.ask].kind != "best_of" for event in answer.outcome]
    total = hashlib.sha256("\n".join(said).replace(str(DEMO_MODEL), "demo").encode()).hexdigest()
    preemptions = int(metric(server.url, "tgi_request_preemptions"))
    return Digest(run, num_shard, _kernels(server), total, len(answers), preemptions, failed)


def _failed(asked: Sequence[Ask], answers: Sequence[StreamAnswer]) -> list[str]:
    return [f"{asked[answer.ask].kind}: {answer.error}" for answer in answers if answer.error]


def _kernels(server: ServerProcess) -> str:
    found = re.search(r"kernels: (.*?)(?: rank=\d+)?$", server.log(), re.MULTILINE)
    return found[1] if found else "unknown"


async def _storm_answers(server: ServerProcess, asked: Sequence[Ask]) -> list[StreamAnswer]:
    """The answers that the client received, in the order of `asked`."""
    answers: list[StreamAnswer] = []
    places = iter(range(len(asked)))

    async def send() -> None:
        for place in places:
            answers.append(await answer_of(client, asked, place))
            if len(answers) == len(asked) // 2:
                os.kill(processes.shards(server.pid)[0].pid, signal.SIGKILL)

    async with client_of(server.url) as client, asyncio.TaskGroup() as tasks:
        client.timeout = STREAM_LIMIT_S
        for _ in range(AT_ONCE):
            tasks.create_task(send())
    return sorted(answers, key=lambda answer: answer.ask)


async def _line_answers(server: ServerProcess, asked: Sequence[Ask], num_shard: int) -> list[StreamAnswer]:
    """As `_storm_answers`, but all requests are in the queue before the first step. While shards are replaced, the
    router accepts requests and runs none. So the first shards are killed, and the next shards are stopped until the
    queue is complete."""
    for shard in processes.shards(server.pid).values():
        shard.kill()

    wait_until(lambda: len(_second_shards(server)) == num_shard, LIMIT_S, "shards of the second epoch")
    stopped = _second_shards(server)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    async with client_of(server.url) as client, asyncio.TaskGroup() as tasks:
        client.timeout = STREAM_LIMIT_S
        answering = []
        length = 0
        for place, ask in enumerate(asked):
            answering.append(tasks.create_task(answer_of(client, asked, place)))
            length += ask.body.get("parameters", {}).get("best_of", 1)
            await _until_queue_has(client, length)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    return [each.result() for each in answering]


def _second_shards(server: ServerProcess) -> list[int]:
    """Pids of the shards of the second epoch. Empty while a shard of the first epoch is ending."""
    with suppress(psutil.Error):
        return [each.pid for each in processes.shards(server.pid).values() if processes.epoch(each) == 2]
    return []


async def _until_queue_has(client: httpx.AsyncClient, length: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while read_metric((await client.get("/metrics")).text, "tgi_queue_size") < length:
            await asyncio.sleep(0.001)


@contextmanager
def environment(launcher: Path, is_reference: bool) -> Iterator[Mapping[str, str]]:
    """Environment variables with which a launcher's shards compute with the chosen kernels."""
    if not is_reference:
        yield {}
        return
    where = "import text_generation_server; print(text_generation_server.__file__)"
    origin = subprocess.check_output([launcher.parent / "python", "-c", where], text=True).strip()
    with tempfile.TemporaryDirectory(prefix="tgi-reference-") as folder:
        without = shutil.ignore_patterns("built", "tests")
        shutil.copytree(Path(origin).parent, f"{folder}/text_generation_server", ignore=without)
        yield {"PYTHONPATH": folder}


def digest_of(run: str, num_shard: int, launcher: Path, environ: Mapping[str, str]) -> Digest:
    arguments = ("--num-shard", str(num_shard), *ARGUMENTS, *(UNTIMED if run == "line" else ()))
    with tempfile.TemporaryDirectory(prefix="tgi-digest-") as folder:
        steps = Path(folder) / "steps"
        with ServerProcess(*arguments, launcher=launcher, environ={**environ, "STEP_LOG": str(steps)}) as server:
            if run == "line":
                return line(server, num_shard, steps)
            return storm(server, num_shard) if run == "storm" else one_by_one(server, num_shard)


def served(run: str, launcher: Path, environ: Mapping[str, str]) -> tuple[Digest, list[Said]]:
    """The digest of a run that sends requests one by one, and its answers."""
    if run == "calls":
        servers = [answers_with_calls(kind, launcher, environ) for kind in requests.CALL_SERVERS]
        kernels, answers = servers[0][0], [said for _, some in servers for said in some]
    else:
        exchanges = {
            "routes": requests.routes,
            "dialect": lambda: requests.dialects(("/v1/completions", "/v1/chat/completions")),
            "refusals": requests.refusals,
        }
        with ServerProcess(*SERVED[run], launcher=launcher, environ=environ) as server:
            names = {str(DEMO_MODEL): "demo"}
            headers = {"authorization": f"Bearer {requests.KEY}"} if run == "refusals" else {}
            answers = all_said(server.url, exchanges[run](), headers, names)
            kernels = _kernels(server)
    failed = [f"{said.title}: {said.status}" for said in answers if said.status >= 400] if run == "routes" else []
    refused = sum(said.is_refused for said in answers)
    if run == "refusals" and refused < MIN_REFUSALS:
        failed.append(f"{refused} refusals only")
    total = hashlib.sha256("".join(said.text() for said in answers).encode()).hexdigest()
    return Digest(run, 1, kernels, total, len(answers), 0, failed), answers


def answers_with_calls(
    kind: tuple[str, str, bool], launcher: Path, environ: Mapping[str, str]
) -> tuple[str, list[Said]]:
    """Starts a server whose model writes tool calls in the format `kind`. Returns the name of the server's kernels, and
    its answers to all requests of the calls run."""
    answers: list[Said] = []
    with (
        tempfile.TemporaryDirectory(prefix="tgi-calls-") as folder,
        WritingServer(Path(folder), *kind, launcher=launcher, environ=environ) as server,
    ):
        for case in requests.call_texts(*kind[:2], server.special):
            server.write(case.text)
            answers += all_said(
                server.url, requests.calls_exchanges(case), {}, {folder: "model", Path(folder).name: "model"}
            )
        return _kernels(server.process), answers


def write_answers(folder: Path, run: str, answers: Sequence[Said]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{run}.txt").write_text("\n".join(said.text() for said in answers))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--launcher", type=Path, nargs="+", default=[LAUNCHER], help="text-generation-launcher of each version to run"
    )
    parser.add_argument("--reference", action="store_true", help="compute with the reference kernels")
    parser.add_argument("--num-shard", type=int, nargs="+", default=[1, 2], help="numbers of shards")
    parser.add_argument("--run", choices=RUNS, nargs="+", default=RUNS, help="some of the runs only")
    parser.add_argument("--write", type=Path, help="folder for the answers of the runs that send requests one by one")
    asked = parser.parse_args()
    found: list[Digest] = []
    with ExitStack() as stack:
        versions = [(each, stack.enter_context(environment(each, asked.reference))) for each in asked.launcher]
        shards_and_runs = product(asked.num_shard, [run for run in asked.run if run in MIXED_RUNS])
        for (num_shard, run), (launcher, environ) in product(shards_and_runs, versions):
            found.append(digest_of(run, num_shard, launcher, environ))
            print(found[-1], flush=True)
        for run, (place, (launcher, environ)) in product(asked.run, enumerate(versions, 1)):
            if run in SERVED:
                digest, answers = served(run, launcher, environ)
                found.append(digest)
                print(digest, flush=True)
                if asked.write:
                    write_answers(asked.write / str(place), run, answers)
    failures = [failure for digest in found for failure in digest.failures()]
    failures += differences(found)
    if asked.reference and not all(digest.kernels.startswith("torch's") for digest in found):
        failures.append("a run had compiled kernels")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
