"""Each query of TGI's Grafana board (`tgi_board.txt`) has an answer after a few requests: by the names and labels of
the metrics page, and by Prometheus itself where it is installed. `container`, for which each query asks, comes from
`monitoring/prometheus.yml`."""

import asyncio
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from calls import client_of, events_of, generate, metric
from server_process import ServerProcess, free_port, wait_until

QUERIES = [tuple(line.split(" | ")) for line in Path(__file__).with_name("tgi_board.txt").read_text().splitlines()]
IDS = [f"{panel}, {number}" for number, (panel, _) in enumerate(QUERIES)]
SAMPLE = Path(__file__).parent.parent / "monitoring" / "prometheus.yml"
CONTAINER = "text-generation-inference"
PROMETHEUS = shutil.which("prometheus")
# Gauges of what is there now: 0 when the load is over.
OF_NOW = {"tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens"}
LIMIT_S = 30.0

Ask = Callable[[str], list[Any]]


async def load(url: str) -> None:
    """A long stream, which is left once short requests have joined it and ended; a request that is refused."""
    async with client_of(url) as client:
        parameters = {"max_new_tokens": 1900, "ignore_eos_token": True}
        async with client.stream("POST", "/generate_stream", json={"inputs": "Once", "parameters": parameters}) as long:
            await anext(events_of(long))
            await asyncio.gather(*(generate("Once upon a time", max_new_tokens=count)(client) for count in (2, 4, 6)))
        wait_until(lambda: metric(url, "tgi_batch_current_size") == 0, LIMIT_S, "the long stream's row is free")
        refused = await client.post("/generate", json={"inputs": ""})
        assert refused.status_code == 422


@pytest.fixture(scope="module")
def page(server: ServerProcess) -> dict[str, float]:
    """The series of a server after the load, by name and labels."""
    asyncio.run(load(server.url))
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))}


@pytest.mark.parametrize("query", [query for _, query in QUERIES], ids=IDS)
def test_what_a_query_names_has_samples_after_the_load(page: dict[str, float], query: str) -> None:
    name, text = next(iter(re.findall(r"(\w+)\{([^}]*)\}", query)))
    matchers = dict(re.findall(r'(\w+)="([^"]*)"', text))
    assert matchers.pop("container") == "$service"
    wanted = {f'{label}="{value}"' for label, value in matchers.items()}
    wanted |= {'le="+Inf"'} if name.endswith("_bucket") else set()
    found = {
        series: value
        for series, value in page.items()
        if series.partition("{")[0] == name and wanted <= set(re.findall(r'\w+="[^"]*"', series))
    }
    assert found, "the page has the metric with these labels"
    assert sum(found.values()) > 0 or name in OF_NOW | {"tgi_request_skipped_tokens_bucket"}
    for label in re.findall(r"\bby \((\w+)\)", query):
        assert all(f'{label}="' in series for series in found)


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """A Prometheus that scraped the server before and after the load, with our sample configuration; its answer to a
    query."""
    if PROMETHEUS is None:
        pytest.skip("needs Prometheus on the PATH: `apt-get install prometheus`, then run this test again")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    sample = SAMPLE.read_text().replace("localhost:3000", server.url.removeprefix("http://"))
    (folder / "prometheus.yml").write_text(sample.replace("scrape_interval: 5s", "scrape_interval: 300ms"))
    command = [
        PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip

    def ask(query: str) -> list[Any]:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query}, timeout=30)
        except httpx.TransportError:
            return []
        return answer.json()["data"]["result"] if answer.status_code == 200 else []

    def has_scraped() -> bool:
        return any(float(found["value"][1]) >= 2 for found in ask("count_over_time(tgi_request_count[5m])"))

    def sees(number: float) -> bool:
        return any(float(found["value"][1]) == number for found in ask("tgi_request_success"))

    with subprocess.Popen(command) as process:
        try:
            wait_until(has_scraped, LIMIT_S, "Prometheus scrapes the server")
            asyncio.run(load(server.url))
            text = httpx.get(f"{server.url}/metrics", timeout=30).text
            answered = float(
                next(line for line in text.splitlines() if line.startswith("tgi_request_success ")).split()[1]
            )
            wait_until(lambda: sees(answered), LIMIT_S, "Prometheus has the numbers after the load")
            yield ask
        finally:
            process.terminate()


@pytest.mark.parametrize("query", [query for _, query in QUERIES], ids=IDS)
def test_prometheus_answers_each_query_of_the_board_with_numbers(prometheus: Ask, query: str) -> None:
    found = prometheus(query.replace("$service", CONTAINER))
    assert found and not any(math.isnan(float(series["value"][1])) for series in found)


def test_the_boards_variable_has_a_choice(prometheus: Ask) -> None:
    """The board takes its containers from the label of this metric."""
    assert {series["metric"]["container"] for series in prometheus("tgi_request_count")} == {CONTAINER}
