import logging

from text_generation_router.engine.protocol import Ended
from text_generation_router.scheduling.request import EndReason

CANARY = "canary-7f3a"


def ask_everything(server):
    message = {"role": "user", "content": CANARY}
    for stream in (False, True):
        for path in ("/", "/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"):
            for inputs in (CANARY, CANARY * 99):
                server.post(path, {"inputs": inputs, "prompt": inputs, "messages": [message], "stream": stream})
    for rule in (CANARY, f"{CANARY}("):
        server.post("/generate", {"inputs": "Hi", "parameters": {"grammar": {"type": "regex", "value": rule}}})
        server.post("/v1/completions", {"prompt": "Hi", "guided_json": {"properties": {rule: {"pattern": rule}}}})
        server.post("/v1/completions", {"prompt": "Hi", "guided_grammar": rule})


def test_no_text_of_users_or_models_is_logged(server, caplog):
    server.engine.script.texts = (CANARY, CANARY)
    with caplog.at_level(logging.DEBUG):
        ask_everything(server)
        server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="boom"))
        ask_everything(server)
    assert "Success" in caplog.text and CANARY not in caplog.text
    assert CANARY.encode() not in server.get("/metrics").body


def test_one_line_per_answered_request_has_its_numbers(server, caplog):
    with caplog.at_level(logging.INFO):
        server.post("/generate", {"inputs": "Hi"})
        server.post("/generate", {"inputs": ""})
    [record] = [record for record in caplog.records if record.getMessage().startswith("Success")]
    assert record.fields["prompt_tokens"] == 2 and record.fields["queue_time"] == "0.250000s"
    assert record.fields["generated_tokens"] == 2
