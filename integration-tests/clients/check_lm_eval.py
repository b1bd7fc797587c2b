"""Runs tasks of lm-eval, in the default mode of its model `local-completions`, against the server at argv[1], and with
transformers on the model's folder argv[2] in float32. The server must compute in float32."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"LMEVAL_LOG_LEVEL": "ERROR", "TQDM_DISABLE": "1"}

import lm_eval
from checks import Checks
from lm_eval.tasks import TaskManager

TOLERANCE = 1e-3

# question, choices, index of the answer
ITEMS = [
    ("What is 2 + 3?", ["5", "4", "9"], 0),
    ("What is 17 + 25?", ["41", "42", "52"], 1),
    ("Once upon a time there was a little", ["girl", "boy named Tom", "of the"], 0),
    ("The dog ran to the", ["park and played", "seven", "because"], 0),
    ("The opposite of big is", ["small", "dog", "very big"], 0),
    ("The sun is", ["wet", "cold and dark", "hot"], 2),
    ("One, two, three,", ["nine", "four", "one hundred"], 1),
    ("She opened the door and", ["saw a cat", "the the", "12"], 0),
]
DATA = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
task: eight_choices
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """
task: eight_texts
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def evaluate(kind: str, folder: Path, **arguments: object) -> dict:
    return lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=["eight_choices", "eight_texts"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        device="cpu",
    )


def both(url: str, model_folder: str) -> tuple[dict, dict]:
    """The results of the server and those of transformers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "items.jsonl"
        rows = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in ITEMS]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for task, text in (("choices", CHOICE), ("texts", TEXT)):
            (folder / f"{task}.yaml").write_text(DATA.format(data=data) + text)
        served = evaluate(
            "local-completions", folder, base_url=f"{url}/v1/completions", model="tgi", tokenizer=model_folder
        )
        return served, evaluate("hf", folder, pretrained=model_folder, dtype="float32", add_bos_token=False)


def samples(results: dict, task: str) -> list[dict]:
    found = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    assert len(found) == len(ITEMS), len(found)
    return found


def log_probabilities(served: dict, computed: dict) -> None:
    largest, count = 0.0, 0
    pairs = zip(samples(served, "eight_choices"), samples(computed, "eight_choices"), strict=True)
    for ours, theirs in pairs:
        for one, other in zip(ours["filtered_resps"], theirs["filtered_resps"], strict=True):
            difference = abs(float(one[0]) - float(other[0]))
            largest, count = max(largest, difference), count + 1
            assert difference <= TOLERANCE and one[1] == other[1], f"{one} instead of {other}"
    print(f"     {count} log-probabilities, the largest difference is {largest:.1e}")


def scores(served: dict, computed: dict) -> None:
    for task, metrics in (("eight_choices", ("acc", "acc_norm")), ("eight_texts", ("exact_match",))):
        for metric in metrics:
            ours, theirs = (results["results"][task][f"{metric},none"] for results in (served, computed))
            assert ours == theirs, f"{metric}: {ours} instead of {theirs}"


def texts(served: dict, computed: dict) -> None:
    pairs = zip(samples(served, "eight_texts"), samples(computed, "eight_texts"), strict=True)
    assert all(ours["filtered_resps"] == theirs["filtered_resps"] for ours, theirs in pairs)


def main(url: str, model_folder: str) -> None:
    checks = Checks("lm-eval")
    found: list[tuple[dict, dict]] = []
    checks.run("tasks run", lambda: found.append(both(url, model_folder)))
    for check in (log_probabilities, scores, texts) if found else ():
        checks.run(check.__name__, lambda check=check: check(*found[0]))
    checks.exit()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
