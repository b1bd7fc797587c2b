import json
import logging

import pytest

from text_generation_common.logs import JsonFormatter, TextFormatter, request_id
from text_generation_common.report import last_told, parted, told


def record(**extra: object) -> logging.LogRecord:
    made = logging.LogRecord("router", logging.WARNING, "", 0, "slow", (), None)
    made.__dict__ |= extra
    return made


@pytest.mark.parametrize(
    ("extra", "of_task", "shown"), [({}, "a", "a"), ({"request_id": "b"}, "a", "b"), ({}, "", None)]
)
def test_a_line_has_the_id_of_the_request_that_it_is_about(extra, of_task, shown):
    """The id given with the line goes before the id of the task that writes it."""
    token = request_id.set(of_task)
    try:
        assert json.loads(JsonFormatter().format(record(**extra))).get("request_id") == shown
        text = TextFormatter().format(record(**extra))
        assert text.endswith(f" request_id={shown}" if shown else "slow")
    finally:
        request_id.reset(token)


def test_a_time_is_a_number_in_json_beside_its_text_and_text_has_it_once() -> None:
    made = record(fields={"queue_time": "0.250000s", "queue_time_s": 0.25, "left_s": 3, "rank": 0})
    assert TextFormatter().format(made).endswith(" router: slow queue_time=0.250000s left_s=3 rank=0")
    entry = json.loads(JsonFormatter().format(made))
    assert (entry["queue_time"], entry["queue_time_s"], entry["left_s"]) == ("0.250000s", 0.25, 3)


# An error's line is parted into cause and hint, and told as text or JSON.
@pytest.mark.parametrize(
    ("cause", "hint"),
    [
        ("port 1 is in use", "choose another --port"),
        ("/m/config.json is not valid JSON (Expecting value: line 1)", "repair it, or download it again"),
        ("/m has no config.json", "is it the directory of a model?"),
        ('model type "lama" is not supported', "did you mean llama? Choose a model of one of these types: bloom"),
        ("--quantize exl2 is not supported yet", "use int8, or start without"),
    ],
)
def test_what_to_do_stands_behind_a_colon(cause: str, hint: str) -> None:
    assert parted(f"{cause}: {hint}") == (cause, hint)


@pytest.mark.parametrize("cause", ["x.safetensors is broken: 5 bytes where its header asks for 10", "`a` must be > 0"])
def test_a_colon_alone_begins_no_hint(cause: str) -> None:
    assert parted(cause) == (cause, "")
    assert parted(f"{cause}; delete it and download the model again") == (
        cause,
        "delete it and download the model again",
    )


def test_tgi_s_sentence_to_the_operator_is_a_hint() -> None:
    text = "Not enough memory to handle 9 prefill tokens. You need to decrease `--max-batch-prefill-tokens`"
    assert parted(text) == ("Not enough memory to handle 9 prefill tokens", text.partition(". ")[2])


def test_text_has_two_lines_and_no_class_and_json_one_with_it() -> None:
    text = "the disk is full:\ndelete something"
    assert told(text, kind="DownloadError") == "error: the disk is full\nhint: delete something"
    assert told("no", hint="yes") == "error: no\nhint: yes" and told("no") == "error: no"
    entry = json.loads(told(text, kind="DownloadError", json_output=True))
    assert entry["timestamp"] and (entry["level"], entry["target"]) == ("ERROR", "text_generation_launcher")
    assert (entry["message"], entry["hint"], entry["kind"]) == ("the disk is full", "delete something", "DownloadError")


@pytest.mark.parametrize("json_output", [False, True])
def test_the_cause_is_found_again_among_other_lines(json_output: bool) -> None:
    lines = ["error is a word", '{"level": "ERROR", "message": "a child\'s"}', '{"level": "ERROR", "mess', "[1]", ""]
    assert last_told(lines) == ""
    both = [told(f"{cause}: delete something", kind="D", json_output=json_output) for cause in ("it was", "it is full")]
    assert last_told([*"\n".join(both).splitlines(), *lines]) == "it is full"
