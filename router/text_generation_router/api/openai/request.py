"""Checks and parameters that completions and chats have in common."""

from dataclasses import replace

from text_generation_router.api.common.services import Services
from text_generation_router.api.openai.answers import wanted_logprobs
from text_generation_router.api.openai.schemas import OpenAIRequest
from text_generation_router.errors import ValidationError
from text_generation_router.text.validation import MUST_FIT, AskedParameters

# Names of fields in errors: the name on /v1 of each field that the checks call by TGI's name.
NAMES = {"max_new_tokens": "max_tokens", "truncate": "truncate_prompt_tokens", "min_new_tokens": "min_tokens"}


def check_request(asked: OpenAIRequest, services: Services) -> None:
    """Raises ValidationError for a field that is wrong in itself or beside another field."""
    most = services.config.requests.max_n
    if not 1 <= asked.choices <= most:
        raise ValidationError.of("n", f"must be >= 1 and <= {most}, the server's --max-n. Given: {asked.n}")
    if asked.stream_options is not None and not asked.stream and not services.style.is_tgis:
        raise ValidationError.of("stream_options", "is allowed only if `stream` is true")
    if asked.prompt_logprobs is not None and asked.stream:
        raise ValidationError.of("prompt_logprobs", "must not be given if `stream` is true")


def parameters_of(
    asked: OpenAIRequest,
    services: Services,
    max_new_tokens: int | None,
    top_n_tokens: int | None,
    echoed: int | None = None,
) -> AskedParameters:
    """`echoed`: number of most likely tokens that `echo` needs with each log-probability of the prompt, or None."""
    parameters = asked.sampling_parameters(max_new_tokens, top_n_tokens, services.style.keeps_stop)
    logprobs, is_length_last = wanted_logprobs(asked, echoed), not services.style.is_tgis
    parameters = replace(parameters, prompt_logprobs=logprobs, is_length_last=is_length_last)
    if asked.model in services.adapters.digests:
        parameters = replace(parameters, adapter_id=asked.model)
    if parameters.grammar is not None and services.style.is_tgis:  # TGI's errors name all such fields alike
        parameters = replace(parameters, grammar=replace(parameters.grammar, field="grammar"))
    if parameters.truncate == -1:  # -1: the longest prompt that leaves room for the tokens that must fit
        limits, must_fit = services.inference.validator.limits, min(max_new_tokens or 0, MUST_FIT)
        most = min(limits.max_input_tokens, limits.max_total_tokens - must_fit)
        return replace(parameters, truncate=max(most, 1))
    return parameters
