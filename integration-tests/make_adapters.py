"""Compares the answers to requests for 8 LoRA adapters and for the model, with options of every kind: alone, in a
crowd, in chunks beside each other with preemptions and fewer slots than adapters, resumed after kills, and on two
replicas.

    .venv/bin/python integration-tests/make_adapters.py [--requests 1000]

Prints a line for each way, and ends with status 1 if an answer differs."""

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from asks import Ask, mixed_asks
from ways import SMALL, Way, compare

sys.path.insert(0, str(Path(__file__).parents[1] / "server/text_generation_server/tests"))
from adapter_tools import sizes_of, some, write_adapter

from text_generation_common.model_files import demo_directory

ADAPTERS, TOKENS = 8, (2, 120)

WAYS = (
    Way("alone", (), at_once=1),
    Way("in a crowd", ()),
    Way("chunks, preempted, 3 slots", ("--max-loras", "3", "--max-cpu-loras", "4", *SMALL), shows=("preempted",)),
    Way("shards killed", ("--max-loras", "5"), kill_every=120, shows=("resumed",)),
    Way("2 replicas, 3 slots, engines killed", ("--replicas", "2", "--max-loras", "3"), kill_every=250),
)


def asks_of(count: int) -> list[Ask]:
    """`count` requests of all kinds in turn, each for one of the adapters or for the model."""
    draw = random.Random(3)
    return [_asking(ask, draw.choice([*map(name_of, range(ADAPTERS)), None])) for ask in mixed_asks(count, TOKENS)]


def _asking(ask: Ask, adapter: str | None) -> Ask:
    if adapter is None:
        return ask
    if "parameters" in ask.body:
        return replace(ask, body=ask.body | {"parameters": ask.body["parameters"] | {"adapter_id": adapter}})
    return replace(ask, body=ask.body | {"model": adapter})


def name_of(number: int) -> str:
    return f"adapter{number}"


def write_adapters(folder: Path) -> str:
    sizes = sizes_of(demo_directory())
    written = [
        write_adapter(folder / name_of(number), some(sizes, 1 + number % 3), 2 + 3 * number, seed=number, gain=0.1)
        for number in range(ADAPTERS)
    ]
    return ",".join(map(str, written))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare answers of adapters in every way in which they are computed.")
    parser.add_argument("--requests", type=int, default=1000)
    asked = asks_of(parser.parse_args().requests)
    with TemporaryDirectory() as folder:
        return int(compare(WAYS, asked, ["--lora-adapters", write_adapters(Path(folder))]) > 0)


if __name__ == "__main__":
    sys.exit(main())
