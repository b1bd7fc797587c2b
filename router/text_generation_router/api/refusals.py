"""Refuses unsupported request fields by name. Does no input or output: the child processes that read large bodies use
it too.

The tables hold fields that change the answer of TGI, OpenAI, vLLM or SGLang, and are not supported here. A field that
is in no table is ignored, as in TGI.
"""

from typing import Any

from text_generation_router.errors import SuffixError, ValidationError

# Maps a field's name to its neutral values, which change nothing. null is always neutral.
Table = dict[str, tuple[Any, ...]]
# Maps a field's name to the name of the route's own field of the same meaning, and to its neutral values. A value that
# equals the own field's value is neutral too.
Renamed = dict[str, tuple[str, tuple[Any, ...]]]

NOWHERE: Table = {
    # Fields that set the form of the text.
    "grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    # Fields that choose other weights.
    "adapter_id": (),
    "lora_path": (),
    # Fields that are about tools.
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "tool_prompt": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    # Fields that are about the chat template.
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    # Fields that change the prompt.
    "truncate_prompt_tokens": (),
    "echo": (False,),
    "prompt_logprobs": (),
    # Fields that change the choice of tokens.
    "n": (1,),
    "num_return_sequences": (1,),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    # Fields that change the content of the answer.
    "skip_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
ONE_TURN: Table = {"add_generation_prompt": (False,), "continue_final_message": (False,)}
OPENAI: Table = NOWHERE | {
    "best_of": (1,),
    "watermark": (False,),
    "truncate": (),
    "return_full_text": (False,),
    "decoder_input_details": (False,),
}
NATIVE_REFUSALS: Table = NOWHERE | ONE_TURN | {"add_special_tokens": (True,)}
TOKENIZE_REFUSALS: Table = {"add_special_tokens": (True,)}
COMPLETION_REFUSALS: Table = OPENAI | ONE_TURN | {"add_special_tokens": (True,)}
CHAT_REFUSALS: Table = OPENAI | {
    "add_special_tokens": (False,),
    "suffix": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}

NATIVE_RENAMED: Renamed = {
    "max_tokens": ("max_new_tokens", ()),
    "max_completion_tokens": ("max_new_tokens", ()),
    "min_tokens": ("min_new_tokens", (0,)),
    "stop_sequences": ("stop", ([],)),
    "logprobs": ("top_n_tokens", (False, 0)),
    "top_logprobs": ("top_n_tokens", (0,)),
    "ignore_eos": ("ignore_eos_token", (False,)),
}
OPENAI_RENAMED: Renamed = {
    "max_new_tokens": ("max_tokens", ()),
    "min_new_tokens": ("min_tokens", (0,)),
    "stop_sequences": ("stop", ([],)),
    "ignore_eos_token": ("ignore_eos", (False,)),
}
COMPLETION_RENAMED: Renamed = OPENAI_RENAMED | {
    "max_completion_tokens": ("max_tokens", ()),
    "top_logprobs": ("logprobs", (0,)),
    "top_n_tokens": ("logprobs", (0,)),
}
CHAT_RENAMED: Renamed = OPENAI_RENAMED | {"top_n_tokens": ("top_logprobs", (0,))}


def refuse_native(value: dict[str, Any]) -> None:
    """Checks the fields in `parameters` and beside it. All functions of this file raise ValidationError."""
    for fields in (value, value.get("parameters")):
        if isinstance(fields, dict):
            refuse(fields, NATIVE_REFUSALS, NATIVE_RENAMED)
            refuse_cut_stop(fields)


def refuse_tokenize(value: dict[str, Any]) -> None:
    """Checks the fields of a request to tokenize, except `parameters`, which have no effect on tokenizing."""
    refuse(value, TOKENIZE_REFUSALS, {})


def refuse_completion(value: dict[str, Any]) -> None:
    """Checks the fields of a completion. Also raises SuffixError, an error that TGI has."""
    if value.get("suffix") is not None:
        raise SuffixError
    refuse(value, COMPLETION_REFUSALS, COMPLETION_RENAMED)
    refuse_cut_stop(value)
    refuse_greedy(value)


def refuse_chat(value: dict[str, Any]) -> None:
    refuse(value, CHAT_REFUSALS, CHAT_RENAMED)
    refuse_cut_stop(value)
    refuse_greedy(value)
    refuse_tool_calls(value)
    refuse_turn(value)


def refuse(value: dict[str, Any], refusals: Table, renamed: Renamed) -> None:
    """Refuses unsupported fields: raises ValidationError that names the first such field."""
    for name in sorted(refusals.keys() & value.keys()):
        if asks(value[name], refusals[name]):
            raise ValidationError(f"`{name}` is not supported yet")
    for name in sorted(renamed.keys() & value.keys()):
        here, neutral = renamed[name]
        if asks(value[name], (*neutral, value.get(here))):
            raise ValidationError(f"`{name}` is not a field of this route, send `{here}`")


def asks(given: Any, neutral: tuple[Any, ...]) -> bool:
    # Types are compared too: true is not 1.
    return given is not None and not any(type(given) is type(item) and given == item for item in neutral)


def refuse_cut_stop(value: dict[str, Any]) -> None:
    """Refuses a field that would cut the stop string off. A text always keeps the stop string that ended it, so with
    stop strings only `true` is accepted.
    """
    name = "include_stop_str_in_output"
    if asks(value.get(name), (True,) if value.get("stop") else (True, False)):
        raise ValidationError(f"`{name}` must be true: a text keeps the stop string that ended it")


def refuse_greedy(value: dict[str, Any]) -> None:
    if asks(value.get("do_sample"), (True,)) and value.get("temperature") != 0:
        raise ValidationError(
            "`do_sample` is not a field of this route, send `temperature` 0 for the most likely tokens"
        )


def refuse_tool_calls(value: dict[str, Any]) -> None:
    messages = value.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("tool_calls"):
            raise ValidationError("`tool_calls` in `messages` is not supported yet")


def refuse_turn(value: dict[str, Any]) -> None:
    """Refuses a field that asks for the wrong turn of a chat: an assistant's last message is continued, any other last
    message is answered.
    """
    messages = value.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    continued = isinstance(last, dict) and last.get("role") == "assistant"
    for name, here in (("continue_final_message", continued), ("add_generation_prompt", not continued)):
        if asks(value.get(name), (here,)):
            what = "is the assistant's and will be continued" if continued else "is not the assistant's"
            raise ValidationError(f"`{name}` must be {str(here).lower()} because the last message {what}")
