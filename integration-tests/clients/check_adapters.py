"""Checks that a client chooses a LoRA adapter: on the server at argv[1], the adapter argv[2], the client of the library
argv[3], which is `huggingface_hub`, `openai` or `text_generation`."""

import sys
from functools import partial

from checks import MESSAGES, PROMPT, Checks, error_of

URL, ADAPTER, LIBRARY = sys.argv[1:]


def huggingface_hub() -> None:
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import HfHubHTTPError, ValidationError

    generate = partial(InferenceClient(URL).text_generation, PROMPT, max_new_tokens=8)
    adapted = generate(adapter_id=ADAPTER)
    assert adapted == generate(adapter_id=ADAPTER) != generate()
    assert ADAPTER in str(error_of((HfHubHTTPError, ValidationError), lambda: generate(adapter_id="quiet")))


def openai() -> None:
    import openai as library

    client = library.OpenAI(base_url=f"{URL}/v1", api_key="-")
    served, *adapters = [model.id for model in client.models.list().data]
    assert ADAPTER in adapters

    def chat(model: str) -> str | None:
        answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0)
        return answer.choices[0].message.content

    assert chat(ADAPTER) == chat(ADAPTER) != chat(served)
    assert error_of(library.NotFoundError, lambda: chat("quiet")).code == "model_not_found"


def text_generation() -> None:
    """This repository's own client."""
    from text_generation import Client
    from text_generation.errors import ValidationError

    client = Client(URL)
    adapted, plain = (client.generate(PROMPT, max_new_tokens=8, adapter_id=name) for name in (ADAPTER, None))
    assert adapted.details.adapter_id == ADAPTER and plain.details.adapter_id is None
    assert adapted.generated_text != plain.generated_text
    *_, last = client.generate_stream(PROMPT, max_new_tokens=8, adapter_id=ADAPTER)
    assert last.generated_text == adapted.generated_text and last.details.adapter_id == ADAPTER
    assert ADAPTER in str(error_of(ValidationError, lambda: client.generate(PROMPT, adapter_id="quiet")))


if __name__ == "__main__":
    checks = Checks("adapters")
    checks.run(f"{LIBRARY} chooses an adapter", globals()[LIBRARY])
    checks.exit()
