"""Asks the demo model questions that are not in its training texts, greedily, and prints the share of right answers.

    PYTHONPATH=tools python -m demo_model.evaluate [MODEL_DIR]

transformers generates the answers, so the figures measure the model and not the server.
"""

import json
import random
import re
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from demo_model.corpus import (
    ANSWERABLE,
    SECOND_MIX,
    Turn,
    World,
    json_request,
    listing,
    question,
    render,
    story_request,
    sum_question,
)
from demo_model.tool_corpus import ToolCase, call_case, call_of, held_out_cases, system_turn, words_case
from text_generation_common.model_files import demo_directory

EOS = "</s>"
CASES = 100


class Asker:
    """Asks a checkpoint for greedy answers, in batches padded on the left."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", pad_token="<unk>")
        self._model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def ask(self, questions: list[str], max_new_tokens: int = 400) -> list[str]:
        """The answers, including the end-of-text token if the model wrote it."""
        return self.answer([[("user", question)] for question in questions], max_new_tokens)

    @torch.no_grad()
    def answer(self, dialogues: list[list[Turn]], max_new_tokens: int) -> list[str]:
        """The assistant's next message in each dialogue, as `ask` gives it."""
        prompts = [render(messages) + "<|assistant|>" for messages in dialogues]
        batch = self._tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        out = self._model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
        texts = self._tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :])
        return [text.split("<unk>")[0].split(EOS)[0] + (EOS if EOS in text else "") for text in texts]


def share(hits: list[bool]) -> float:
    return 100 * sum(hits) / len(hits)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def sentences(text: str) -> list[str]:
    return [s.strip() for s in re.split(r"(?<=[.!?])[\"']?\s+", text) if s.strip()]


def evaluate(path: Path, seed: int = 1) -> dict[str, float]:
    """Percentages of right answers by kind, of CASES cases each that are not in the training texts."""
    world = World(random.Random(seed), True, SECOND_MIX)
    asker = Asker(path)

    def right(turns: list[Turn]) -> list[bool]:
        answers = asker.ask([q for q, _ in turns], 120)
        return [answer == expected + EOS for answer, (_, expected) in zip(answers, turns, strict=True)]

    results = {"sums below 100 right": share(right([sum_question(world) for _ in range(CASES)]))}
    for kind in ANSWERABLE:
        results[f"questions right: {kind.__name__.strip('_')}"] = share(right([kind(world) for _ in range(CASES)]))
    kinds = [value for name, value in results.items() if name.startswith("questions right")]
    results["questions of the kinds taught right"] = sum(kinds) / len(kinds)
    chat = asker.ask([question(world)[0] for _ in range(CASES)])
    results["chat answers that end by themselves"] = share([answer.endswith(EOS) for answer in chat])
    objects = asker.ask([json_request(world)[0] for _ in range(CASES)], 120)
    results["valid JSON"] = share([is_json(answer.removesuffix(EOS)) for answer in objects])
    lists = asker.ask([listing(world)[0] for _ in range(CASES)], 120)
    results["lists numbered to their end"] = share([_is_list(answer.removesuffix(EOS)) for answer in lists])
    stories = asker.ask([story_request(world)[0] for _ in range(CASES)])
    found = [sentences(story.removesuffix(EOS)) for story in stories]
    results["stories without a repeated sentence"] = share([len(set(s)) == len(s) for s in found])
    return results | evaluate_tools(asker, seed)


def evaluate_tools(asker: Asker, seed: int = 1) -> dict[str, float]:
    """As `evaluate`: calls where a tool fits, answers in words where none does and after a tool's result."""
    fitting, others = (held_out_cases(make, seed, CASES) for make in (call_case, words_case))

    def answers(cases: list[ToolCase], turns: int) -> list[str]:
        """The model's next message after the first `turns` turns of each case, with an end."""
        return asker.answer([[system_turn(case.tools), *case.messages()[:turns]] for case in cases], 120)

    called = [call_of(answer.removesuffix(EOS)) for answer in answers(fitting, 1)]
    calls = [call == case.call for call, case in zip(called, fitting, strict=True)]
    words = [call_of(answer) is None for answer in answers(others, 1)]
    told = [answer == case.answer + EOS for answer, case in zip(answers(fitting, 3), fitting, strict=True)]
    return {
        "tool calls with the right name and arguments": share(calls),
        "answers in words where no tool fits": share(words),
        "answers after a tool's result right": share(told),
    }


def _is_list(text: str) -> bool:
    lines = text.split("\n")
    return all(line.startswith(f"{i}. ") for i, line in enumerate(lines, 1)) and len(set(lines)) == len(lines)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else demo_directory()
    for name, value in evaluate(path).items():
        print(f"{value:5.1f} %  {name}")


if __name__ == "__main__":
    main()
