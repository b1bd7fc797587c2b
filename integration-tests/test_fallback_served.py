"""A whole server whose model transformers computes: the same texts as from our own model."""

import random

from calls import at_once
from demo_model.corpus import SECOND_MIX, World, story_request, sum_question
from server_process import ServerProcess
from test_demo_model import ask


def test_the_demo_model_computed_by_transformers_gives_the_same_texts(server: ServerProcess) -> None:
    world = World(random.Random(12), True, SECOND_MIX)
    questions = [kind(world)[0] for kind in (sum_question, story_request) for _ in range(3)]
    ours = at_once(server.url, *(ask(question, 60) for question in questions))
    flags = ("--dtype", "float32", "--max-total-tokens", "512", "--max-batch-total-tokens", "4096", "--testing")
    with ServerProcess(*flags, environ={"WITH_FAMILIES": "0"}) as other:
        assert at_once(other.url, *(ask(question, 60) for question in questions)) == ours
        assert "model type llama is not one of the server's own" in other.log()
