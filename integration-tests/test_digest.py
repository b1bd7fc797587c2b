"""The asks and the verdict of `make digest`."""

from dataclasses import replace

import httpx
from digest_requests import crowded_asks, refusals, routes, with_one_outcome
from exchanges import Exchange, said
from make_digest import Digest, Work, differences

from text_generation_router.api.common.generation_stream import CREDITS
from text_generation_router.openapi.operations import OPERATIONS

LINE = Digest("line", 1, "reference", "abc", 500, 30, (), Work(900, 20_000, 9_000, 70))


def test_no_answer_uses_up_the_credits_of_its_stream_however_slowly_its_client_reads() -> None:
    used = []
    for ask in crowded_asks():
        fields = ask.body.get("parameters", ask.body)
        tops = fields.get("top_n_tokens", fields.get("top_logprobs", 0))
        used.append(fields.get("max_new_tokens", fields.get("max_tokens")) * (1 + tops))
    assert min(used) > 0 and max(used) < CREDITS


def test_no_ask_of_the_line_draws_from_a_seed_of_the_server() -> None:
    for ask in map(with_one_outcome, crowded_asks()):
        fields = ask.body.get("parameters", ask.body)
        draws = fields.get("do_sample") or "temperature" in fields
        assert not draws or "seed" in fields or fields["top_k"] == 1


def test_runs_that_should_be_equal_and_are_not_are_named() -> None:
    storm = replace(LINE, run="storm", preemptions=44, work=None)
    options = replace(LINE, run="options", sha256="def", preemptions=0, work=None)
    assert not list(differences([LINE, storm, options, LINE, replace(LINE, num_shard=2, sha256="other")]))
    other_work = replace(LINE, work=Work(901, 20_000, 9_000, 70))
    for different, named in (
        (replace(storm, sha256="other"), "storms and lines"),
        (replace(options, sha256="other"), "options"),
        (other_work, "lines took different steps"),
        (replace(LINE, preemptions=31), "lines took different steps"),
    ):
        (told,) = differences([LINE, storm, options, different])
        assert told.startswith("1 shards: ") and named in told


def test_each_route_of_the_document_is_asked_whole_streamed_and_with_mistakes() -> None:
    posts = {operation.path for operation in OPERATIONS if operation.method == "post"}
    streams = {each.path for each in OPERATIONS if each.method == "post" and each.answer and each.event}
    asked = [each for each in routes() if each.method == "POST"]
    assert {each.path for each in asked} == posts <= {each.path for each in refusals()}
    assert {each.path for each in asked if each.body.get("stream")} == streams
    assert len([*refusals()]) > 400


def test_an_answer_as_text_has_all_but_ids_times_and_the_order_of_choices() -> None:
    def text(request_id: str, created: int, order: tuple[int, int], word: str = "a") -> str:
        events = [f'data: {{"created":{created},"choices":[{{"index":{i},"text":"{word}"}}]}}\n\n' for i in order]
        body = "".join(events) + f'data: {{"id":"call_{request_id}","request_id":"{request_id}"}}\n\n'
        response = httpx.Response(200, text=body, headers={"x-request-id": request_id, "x-total-time": str(created)})
        with httpx.Client(base_url="http://x", transport=httpx.MockTransport(lambda _: response)) as client:
            return said(client, Exchange("n", "/v1/completions", {}), {}).text()

    first = text("0123456789ab", 1795691448, (0, 1))
    assert first == text("ba9876543210", 1795691449, (1, 0))
    assert first != text("0123456789ab", 1795691448, (0, 1), "b")
    assert "x-total-time: …" in first and '"text":"a"' in first
