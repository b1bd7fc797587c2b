import json
import logging

import pytest

from text_generation_common.logs import JsonFormatter, TextFormatter, request_id


def record(**extra: str) -> logging.LogRecord:
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
