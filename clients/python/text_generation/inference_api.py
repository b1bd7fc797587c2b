"""Clients of Hugging Face's hosted Inference API, under the names that TGI's client has for them.

`HF_INFERENCE_ENDPOINT` is another address of that API; `HF_TOKEN` is the token of a client that is given none.
"""

import os
from collections.abc import Mapping

from text_generation.async_client import AsyncClient
from text_generation.client import Client
from text_generation.errors import NotSupportedError, ServerConnectionError
from text_generation.parse import answer_error, parse_json, parse_list
from text_generation.timeouts import Timeout
from text_generation.types import DeployedModel

INFERENCE_ENDPOINT = os.environ.get("HF_INFERENCE_ENDPOINT", "https://api-inference.huggingface.co")

_FRAMEWORK = "text-generation-inference"
_WAIT_S = 30.0


class InferenceAPIClient(Client):
    """A `Client` of one hosted model, whose name is `repo_id`. Raises NotSupportedError if the API does not serve it
    with text-generation-inference.
    """

    def __init__(self, repo_id: str, token: str | None = None, timeout: float | Timeout = 10) -> None:
        headers = _headers(token)
        super().__init__(_supported_url(repo_id, headers), headers, timeout=timeout)


class InferenceAPIAsyncClient(AsyncClient):
    """An `AsyncClient` of one hosted model. Making it waits for the API's answer, as for `InferenceAPIClient`."""

    def __init__(self, repo_id: str, token: str | None = None, timeout: float | Timeout = 10) -> None:
        headers = _headers(token)
        super().__init__(_supported_url(repo_id, headers), headers, timeout=timeout)


def deployed_models(headers: Mapping[str, str] | None = None) -> list[DeployedModel]:
    """The models that the API serves with text-generation-inference."""
    return parse_list(DeployedModel, _get(f"{INFERENCE_ENDPOINT}/framework/{_FRAMEWORK}", headers))


def check_model_support(repo_id: str, headers: Mapping[str, str] | None = None) -> bool:
    """Whether the API serves this model with text-generation-inference."""
    status = parse_json(_get(f"{INFERENCE_ENDPOINT}/status/{repo_id}", headers))
    return isinstance(status, dict) and status.get("framework") == _FRAMEWORK


def _supported_url(repo_id: str, headers: Mapping[str, str]) -> str:
    if not check_model_support(repo_id, headers):
        raise NotSupportedError(repo_id)
    return f"{INFERENCE_ENDPOINT}/models/{repo_id}"


def _headers(token: str | None) -> dict[str, str]:
    token = token or os.environ.get("HF_TOKEN")
    return {"authorization": f"Bearer {token}"} if token else {}


def _get(url: str, headers: Mapping[str, str] | None) -> bytes:
    import httpx

    try:
        answer = httpx.get(url, headers=dict(headers or {}), timeout=_WAIT_S, follow_redirects=True)
    except httpx.HTTPError as error:
        raise ServerConnectionError(f"no answer from {url}: {error or type(error).__name__}") from None
    if answer.status_code != httpx.codes.OK:
        raise answer_error(answer.status_code, answer.content)
    return answer.content
