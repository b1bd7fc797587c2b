"""Changes tokenizer.json and chat templates at random, and has them checked as a start does: `make fuzz-files`. Prints
its seed.

The check takes the files, refuses them in one line, or is ended by its limits. Files that it has taken are then used as
a router uses them in its own process: texts are tokenized, and chats that the template's source shows to be cheap are
rendered. Each use must end by itself within the limits of the check."""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from calls import DEMO_MODEL
from tokenizers import Tokenizer

from text_generation_common.weights.child import limit_reader, main_of
from text_generation_router.errors import TemplateError
from text_generation_router.text.templates.chat_template import Conversation, Message
from text_generation_router.text.templates.file_check import check
from text_generation_router.text.templates.files import load_chat_template

TEMPLATES = sorted((DEMO_MODEL.parents[2] / "router/text_generation_router/text/tests/templates").glob("*.jinja"))
TAKEN, REFUSED = 0, 1
ODD: tuple[Any, ...] = (None, True, -1, 0, 2**31, 2**63, 1e308, "", "a", "x" * 5000, [], {}, [[]], {"String": ""})
TEXTS = ("", "a", "The fox lost a lamp. é😀\n\t" * 40, "a" * 1000, " " * 1000, "<|user|></s>" * 50)
CHATS = tuple(
    Conversation(tuple(Message(role, text) for role in ("system", "user", "assistant", "user")[:count]))
    for text in TEXTS
    for count in (1, 4)
)


def odd_tokenizer(content: bytes, rng: random.Random) -> bytes:
    """A tokenizer.json with one to three values, or a few bytes, that are others."""
    if rng.random() < 0.3:
        changed = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    rules = json.loads(content)
    for _ in range(rng.randint(1, 3)):
        change(rules, rng)
    return json.dumps(rules).encode()


def change(value: Any, rng: random.Random) -> None:
    """Changes one value somewhere inside: to an odd one, to another of its neighbours, or to itself within a list."""
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        if not keys:
            return
        key = rng.choice(keys)
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            value = inner
            continue
        drawn = rng.random()
        value[key] = (
            deepcopy(rng.choice(ODD)) if drawn < 0.6 else [inner] * 50 if drawn < 0.7 else value[rng.choice(keys)]
        )
        return


def odd_template(rng: random.Random) -> str:
    """A real template whose words are mixed with those of another."""
    words, others = (rng.choice(TEMPLATES).read_text().split(" ") for _ in range(2))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(words))
        count = rng.choice((0, 1, 1, 3, 8))
        first = rng.randrange(max(1, len(others) - count))
        words[at : at + rng.choice((0, 1, 3))] = others[first : first + count]
    return " ".join(words)


def use(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text).ids)
    template = load_chat_template(folder)
    for chat in CHATS if template is not None else ():
        if template.is_cheap(chat):
            try:
                template.render(chat)
            except TemplateError:
                continue


def limited_use(folder: Path) -> None:
    limit_reader([folder / "tokenizer.json"])
    use(folder)


def end_of(work: Callable[[Path], None], folder: Path) -> int:
    """The exit status of `work` in a process of its own; negative: the signal that has ended it."""
    pid = os.fork()
    if not pid:
        sys.argv[1:] = [str(folder)]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        status = TAKEN
        try:
            main_of(work)
        except SystemExit:
            status = REFUSED
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--keep", type=Path, help="a folder for the files whose use has failed")
    asked = parser.parse_args()
    rng, ends, bad = random.Random(asked.seed), Counter[str](), 0
    print(f"seed {asked.seed}", flush=True)
    content = (DEMO_MODEL / "tokenizer.json").read_bytes()
    with tempfile.TemporaryDirectory(prefix="tgi-fuzz-") as place:
        folder = Path(place)
        for number in range(asked.count):
            is_template = rng.random() < 0.5
            (folder / "tokenizer.json").write_bytes(content if is_template else odd_tokenizer(content, rng))
            (folder / "chat_template.jinja").write_text(odd_template(rng) if is_template else "")
            kind, status = "template" if is_template else "tokenizer", end_of(check, folder)
            how = {TAKEN: "taken", REFUSED: "refused"}.get(status) or f"ended by {signal.Signals(-status).name}"
            ends[f"{kind} {how}"] += 1
            if status == TAKEN and (used := end_of(limited_use, folder)) != TAKEN:
                bad += 1
                print(f"case {number}: the check takes this {kind}, and its use ends with {used}", flush=True)
                if asked.keep is not None:
                    shutil.copytree(folder, asked.keep / f"{asked.seed}-{number}")
    print(*(f"{count:7} {end}" for end, count in ends.most_common()), sep="\n")
    sys.exit(f"{bad} of {asked.count} cases have failed" if bad else 0)


if __name__ == "__main__":
    main()
