"""Named places where a test makes a process fail: `FAILPOINTS="shard.decode[epoch=2,rank=0]:kill@17"`.

A rule is `point[label=value,…]:action@pass`; rules are separated by `;`. Actions: kill and stop (the signals), exit,
raise, delay=SECONDS, emit=FILE. A rule acts at the given passes through the point (`@3,9`, `@every 50`; the first pass
when left out; emit: always), in processes whose labels match. Only commands that were started with the hidden flag
`--testing` read FAILPOINTS. A point in a process without rules costs one look at an empty tuple. Standard library only.
"""

import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger("text_generation_faults")

RULE = re.compile(
    r"(?P<point>[a-z_.]+)"
    r"(?:\[(?P<labels>[a-z_]+=\w+(?:,[a-z_]+=\w+)*)\])?"
    r":(?:(?P<action>kill|stop|exit|raise|delay)(?:=(?P<seconds>[0-9.]+))?|emit=(?P<file>[^;@\s]+))"
    r"(?:@(?:every (?P<every>\d+)|(?P<passes>\d+(?:,\d+)*)))?"
)


# Logged by a command that finds FAILPOINTS in its environment and was started without --testing.
NOT_TESTING = "FAILPOINTS is set and has no effect: only processes that were started with --testing read it"


class InjectedFault(Exception):
    """Raised by the action `raise`."""


@dataclass(slots=True)
class Rule:
    point: str
    action: str
    seconds: float
    every: int  # act at the passes `every`, 2 * `every`, …; 0: act at the passes in `at`
    at: frozenset[int]
    token: int | None  # count only the passes that work on this token; None: count all passes
    file: str = ""  # path of the file that a rule `emit` names; empty for other rules
    passed: int = field(default=0)  # number of passes counted until now

    def is_due(self) -> bool:
        self.passed += 1
        return self.passed % self.every == 0 if self.every else self.passed in self.at


_rules: tuple[Rule, ...] = ()


def setup(text: str, **labels: object) -> None:
    """Takes the rules whose labels match those of this process. ValueError for a text that is not a rule."""
    global _rules
    _rules = tuple(rule for part in text.split(";") if part.strip() and (rule := _parse(part.strip(), labels)))


def setup_command(text: str, testing: bool, **labels: object) -> None:
    """`setup` for a command. `text` is FAILPOINTS from its environment, and has no effect unless `testing`."""
    if testing:
        setup(text, **labels)
    elif text:
        logger.warning(NOT_TESTING)


def point(name: str, tokens: Callable[[], Iterable[int]] = tuple) -> None:
    """A place that may fail. `tokens` returns the ids that the place works on; called only if a rule names a token."""
    at_point = [rule for rule in _rules if rule.point == name and not rule.file]
    passing = [rule for rule in at_point if rule.token is None or rule.token in tokens()]
    for rule in [rule for rule in passing if rule.is_due()]:
        logger.warning("fault injected: %s %s at pass %d", name, rule.action, rule.passed)
        ACTIONS[rule.action](rule)


def emitted(name: str) -> list[int]:
    """The token ids that take the place of those sampled at this point, the first token of each text first; empty
    without a rule emit=FILE. The file is a JSON list, which is read at each call."""
    files = [rule.file for rule in _rules if rule.point == name and rule.file]
    return [int(i) for i in json.loads(Path(files[0]).read_text())] if files else []


def _parse(text: str, labels: dict[str, object]) -> Rule | None:
    match = RULE.fullmatch(text)
    if match is None:
        raise ValueError(f"FAILPOINTS: {text!r} is not a rule: write it as point[label=value]:kill@3")
    if (match["action"] == "delay") != (match["seconds"] is not None):
        raise ValueError(f"FAILPOINTS: {text!r}: delay needs seconds, as delay=0.5; other actions take none")
    if match["file"] and (match["every"] or match["passes"]):
        raise ValueError(f"FAILPOINTS: {text!r}: emit acts at every pass, leave out @")
    wanted = dict(pair.split("=") for pair in (match["labels"] or "").split(",") if pair)
    token = wanted.pop("token", None)
    if token is not None and not token.isdecimal():
        raise ValueError(f"FAILPOINTS: {text!r}: token must be the id of a token, as token=17")
    if any(str(labels.get(name)) != value for name, value in wanted.items()):
        return None
    at = frozenset(map(int, (match["passes"] or "1").split(",")))
    seconds, every = float(match["seconds"] or 0), int(match["every"] or 0)
    on_token = int(token) if token is not None else None
    return Rule(
        point=match["point"],
        action=match["action"] or "emit",
        seconds=seconds,
        every=every,
        at=at,
        token=on_token,
        file=match["file"] or "",
    )


def _raise(rule: Rule) -> None:
    raise InjectedFault(f"injected at {rule.point}")


def _exit(rule: Rule) -> None:
    os._exit(1)


ACTIONS: dict[str, Callable[[Rule], None]] = {
    "kill": lambda rule: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda rule: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": _exit,
    "raise": _raise,
    "delay": lambda rule: time.sleep(rule.seconds),
}
