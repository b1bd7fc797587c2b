"""Gives the texts of router text/calls/tests/call_texts.jsonl to our readers and to vLLM's, and compares what they make
of them. Ends with status 1 if they differ in a text that `parser_differences.json` does not argue, or agree in one that
it does.

    python compare_parsers.py PYTHON-OF-AN-ENVIRONMENT-WITH-VLLM [--show]
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from text_generation_router.text.calls.formats import CALL_FORMATS, REASONING_FORMATS
from text_generation_router.text.calls.reading import Reading
from text_generation_router.text.calls.tests.call_texts import CALL_TEXTS, TOOLS, CallText
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, Reasoning, Text

VLLM_SIDE = Path(__file__).with_name("vllm_parsers.py")
# By the text's label: why ours reads it otherwise.
REASONS = json.loads(Path(__file__).with_name("parser_differences.json").read_text())
DIFFERENCES = {label: reason for reason, labels in REASONS.items() for label in labels}


def question(case: CallText) -> dict[str, Any]:
    thinks = REASONING_FORMATS[case.reasoning_format]
    texts = " ".join((*CALL_FORMATS[case.format].texts, *thinks.markers))
    return {
        "format": case.format,
        "text": case.text,
        "tools": TOOLS,
        "markers": list(dict.fromkeys(re.findall(r"<[^\s<>]+>|\[/?[A-Z_]+\]", texts))),
        "reasoning_format": case.reasoning_format,
        "reasoning_markers": bool(case.reasoning),
    }


def ours(case: CallText) -> dict[str, Any]:
    reader = Reading(CALL_FORMATS[case.format], REASONING_FORMATS[case.reasoning_format]).reader(TOOLS, case.prompt)
    pieces = [*reader.push(case.text), *reader.finish()]
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            calls[piece.index][1] += piece.text
    return {
        "reasoning": "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        "content": "".join(piece.text for piece in pieces if isinstance(piece, Text)),
        "calls": calls,
    }


def compared(answer: dict[str, Any]) -> object:
    """What is compared: texts without white space around them, and arguments as values. vLLM gives no text after the
    first call, so with calls only their names and arguments, and the reasoning, are compared."""
    calls = [(name, value_of(arguments)) for name, arguments in answer["calls"]]
    return calls, answer["reasoning"].strip(), "" if calls else answer["content"].strip()


def value_of(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments.strip()


def main() -> int:
    python, show = sys.argv[1], "--show" in sys.argv
    questions = json.dumps([question(case) for case in CALL_TEXTS])
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, str(VLLM_SIDE)], input=questions, stdout=subprocess.PIPE, text=True, timeout=900, env=environment
    )
    if done.returncode:
        return done.returncode
    answers = json.loads(done.stdout[done.stdout.index("[{") :])
    same = missing = argued = wrong = 0
    for case, theirs in zip(CALL_TEXTS, answers, strict=True):
        mine = ours(case)
        if theirs.get("missing"):
            missing += 1
            continue
        agrees = "error" not in theirs and compared(mine) == compared(theirs)
        is_argued = case.label in DIFFERENCES
        same, argued = same + agrees, argued + (is_argued and not agrees)
        if agrees == is_argued:
            wrong += 1
            print(f"{case.label}: {'argued, but the same' if agrees else 'differs'}")
        if (show and not agrees) or (not agrees and not is_argued):
            print(f"  text  {case.text!r}\n  ours  {mine}\n  vLLM  {theirs}")
    print(
        f"{len(CALL_TEXTS)} texts: {same} the same, {argued} differ as argued, {missing} without a peer, {wrong} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
