"""The table of known fields: what fields of TGI, OpenAI, Anthropic, vLLM, SGLang and llama.cpp mean where a schema does
not have them. `contract.py` explains the classes.

A row has names, their class, the values that ask for nothing, the places for which it holds (`on`), and the reason that
a client is told. Where a schema has a name, the field is honoured, and no row counts.
"""

from typing import Any

from text_generation_router.api.common.contract import Refused, Renamed, Rule, Tolerated

Row = tuple[str, str, Rule]  # names of fields, their places, their meaning
# Places: routes (native: in `parameters` and beside it; messages: also count_tokens), then objects in their bodies.
ROUTES = "native completions chat responses messages"
TEXTS, CHATS = "native completions", "chat responses messages"
OPENAI, OTHER_CHATS = "completions chat", "responses messages"
PLACES = (
    f"{ROUTES} beside tokenize stream_options chat.messages chat.tools chat.functions responses.reasoning"
    " responses.tools items items.web_search_call items.function_call_output items.reasoning"
    " messages.tools thinking output_config blocks.text blocks.tool_use blocks.tool_result"
)


def refused(names: str, *neutral: Any, on: str = ROUTES, why: str = "is not supported yet") -> Row:
    """A row of fields that change the answer and are not supported. `neutral`: values that change nothing."""
    return names, on, Refused(why, neutral)


def renamed(names: str, here: str, *neutral: Any, on: str) -> Row:
    """A row of fields with the same meaning as the route's own field `here`."""
    return names, on, Renamed(here, neutral)


def tolerated(names: str, why: str, on: str = ROUTES) -> Row:
    """A row of fields that are accepted and change no answer."""
    return names, on, Tolerated(why)


def send(instead: str) -> str:
    return f"is not a field of this route, send {instead}"


FORM = "ebnf guided_choice guided_grammar guided_json guided_regex json_schema regex structured_outputs"
FREE_TEXT = {"type": "text"}
OF_CHATS = send("the request to /v1/chat/completions")
NOT_HERE = "is not supported on this route, send the request to /v1/chat/completions"
NO_BEAMS = "is not supported: there is no beam search"
NOT_STORED = "is not supported: answers are not stored, send the whole conversation in"
ALL_MESSAGES = "is not supported: every message is part of the prompt"
# The value of `context_management` that agents send with every request: it keeps all reasoning, as this server always
# does.
ALL_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
CACHED = "every prompt is looked up in the prefix cache"

TABLE: tuple[Row, ...] = (
    # Fields that set the form of the text.
    renamed(FORM, "grammar", on="native"),
    refused(f"grammar {FORM}", on=OTHER_CHATS),
    # On native routes, a `grammar` beside `parameters` is refused, although most fields beside `parameters` are ignored
    # as unknown.
    refused("grammar", on="beside", why="is a field of `parameters`"),
    renamed("response_format", "grammar", FREE_TEXT, on="native"),
    refused("response_format", FREE_TEXT, on="responses", why=send("`text`")),
    refused("response_format", FREE_TEXT, on="messages"),
    refused("output_format", on="messages", why=send("`output_config`")),
    refused("verbosity", "medium", on="chat"),
    refused("verbosity", "medium", on="responses", why=send("`text`")),
    refused("structural_tag custom_logit_processor custom_params repetition_detection"),
    refused("guided_whitespace_pattern", why="is not supported: white space is at most one space"),
    tolerated("guided_decoding_backend", "there is one engine for grammars"),
    # Fields that choose weights.
    refused("lora lora_path"),
    refused("adapter_id", on="completions chat responses messages", why=send("`model`")),
    refused("adapter_id", on="beside", why="is a field of `parameters`"),
    # Fields about tools and their calls.
    refused("tools", []),
    refused("tool_choice", "none", "auto"),
    refused("tool_prompt", "", on=TEXTS),
    refused("tool_prompt", "", on=OTHER_CHATS, why=OF_CHATS),
    refused("functions", [], on=TEXTS),
    refused("functions", [], on=CHATS, why="is OpenAI's older form, send `tools`"),
    refused("function_call", "none", "auto", on=TEXTS),
    refused("function_call", "none", "auto", on=CHATS, why="is OpenAI's older form, send `tool_choice`"),
    refused("function_call", {}, on="chat.messages"),
    tolerated("parallel_tool_calls", "there are no tool calls without `tools`"),
    tolerated("max_tool_calls", "there are no tool calls without `tools`", on=TEXTS),
    tolerated("max_tool_calls", "limits tools that a server runs, and the client runs its own", on=CHATS),
    refused("mcp_servers", [], on="messages", why="is not supported: the server calls no other servers"),
    refused("container", on="messages", why="is not supported: the server runs no code"),
    refused("web_search_options", on="chat"),
    refused("allowed_callers", ["direct"], on="messages.tools", why="is not supported: the model alone calls tools"),
    refused(
        "allowed_callers", ["direct"], on="responses.tools", why="is not supported: the model alone calls functions"
    ),
    refused(
        "defer_loading", False, on="chat.tools messages.tools", why="is not supported: the model is told of every tool"
    ),
    refused("defer_loading", False, on="responses.tools", why="is not supported: the model is told of every function"),
    refused("async", False, on="responses.tools", why="is not supported: a result is part of the next request"),
    tolerated("async", "a result is part of the prompt when it is sent", on="items"),
    tolerated("eager_input_streaming", "arguments are sent as they are made", on="messages.tools"),
    refused("input_examples", [], on="messages.tools", why="is not supported: write them into `description`"),
    tolerated("output_schema", "the client alone reads what a function returns", on="responses.tools"),
    tolerated("arguments", "is TGI's name of `parameters`", on="chat.functions"),
    tolerated("response", "the model is told of a result by the result itself", on="chat.functions"),
    tolerated("caller", "every function is called directly", on="items"),
    tolerated("caller", "every tool is called directly", on="blocks.tool_use"),
    tolerated("name namespace", "the call has the function's name", on="items.function_call_output"),
    refused("toolset_name", on="blocks.tool_use blocks.tool_result", why="is not supported: there are no toolsets"),
    tolerated("action", "another server has searched", on="items.web_search_call"),
    # Fields that make the prompt.
    refused("inputs", on=OPENAI, why="is a field of /generate"),
    refused(
        "parameters", {}, on=OPENAI, why="is a field of /generate: on this route its fields stand in the body itself"
    ),
    refused("messages", on="completions", why="is a field of /v1/chat/completions"),
    refused("messages", on="responses", why="is a field of /v1/chat/completions, send `input`"),
    refused("prompt", on="chat messages", why="is a field of /v1/completions"),
    refused(
        "prompt", on="responses", why="is not supported: there are no stored prompts, send `input` and `instructions`"
    ),
    refused("suffix", on=OPENAI),
    refused("prediction", on="chat"),
    refused("previous_response_id conversation", on="responses", why=f"{NOT_STORED} `input`"),
    refused("thread", on="messages", why=f"{NOT_STORED} `messages`"),
    refused("diagnostics", {}, on="messages", why=f"{NOT_STORED} `messages`"),
    refused("context_management", [], on="responses", why="is not supported: every item is part of the prompt"),
    refused("context_management", {}, {"edits": []}, ALL_THINKING, on="messages", why=ALL_MESSAGES),
    refused("compaction", on="messages", why=ALL_MESSAGES),
    refused(
        "chat_template", why="is not supported, because a template is a program; choose one with the server's flags"
    ),
    refused("chat_template_kwargs", {}, on=TEXTS),
    refused("chat_template_kwargs", {}, on=OTHER_CHATS, why=OF_CHATS),
    refused("documents", [], on=TEXTS),
    refused("documents", [], on=OTHER_CHATS, why=OF_CHATS),
    refused("add_generation_prompt continue_final_message echo", False),
    refused("add_special_tokens", True, on="native tokenize"),
    refused("truncate_prompt_tokens truncation_side"),
    renamed("truncate", "truncate_prompt_tokens", on=OPENAI),
    refused(
        "truncation", "disabled", on="responses", why="is not supported: a conversation that is too long is refused"
    ),
    refused("prompt_embeds mm_payload"),
    refused("media_io_kwargs mm_processor_kwargs", {}),
    refused("audio", on="chat chat.messages"),
    tolerated("image", "there are no images here", on="responses"),
    tolerated("citations", "citations are not part of the prompt", on="blocks.text"),
    refused("kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room"),
    # Fields that choose tokens, and that end the text.
    refused("n num_return_sequences", 1),
    refused("best_of", 1, on=OPENAI),
    refused("use_beam_search", False, why=f"{NO_BEAMS}, send `n` for several texts"),
    refused("length_penalty", 1, 1.0, why=NO_BEAMS),
    refused("early_stopping", False, why=NO_BEAMS),
    refused("do_sample", True, on="messages", why=send("`temperature` 0 for the most likely tokens")),
    refused("sampling_seed", why=send("`seed`")),
    refused("samplers"),
    refused("logits_processors", []),
    refused("vllm_xargs", {}),
    refused("watermarking no_stop_trim", False),
    refused("watermark", False, on=OPENAI),
    refused("dynatemp_range xtc_probability dry_multiplier", 0, 0.0),
    refused("dynatemp_exponent", 1, 1.0),
    refused("xtc_threshold", 0.1),
    tolerated("dry_base dry_allowed_length dry_penalty_last_n", "has no effect without `dry_multiplier`"),
    tolerated("dry_sequence_breakers", "has no effect without `dry_multiplier`"),
    refused("mirostat", 0),
    tolerated("mirostat_tau mirostat_eta", "has no effect without `mirostat`"),
    refused("top_n_sigma", -1, -1.0),
    renamed("max_tokens max_completion_tokens", "max_new_tokens", on="native"),
    renamed("max_new_tokens max_completion_tokens", "max_tokens", on="completions chat messages"),
    renamed("max_new_tokens max_completion_tokens max_tokens", "max_output_tokens", on="responses"),
    renamed("min_tokens", "min_new_tokens", 0, on="native"),
    renamed("min_new_tokens", "min_tokens", 0, on=OPENAI),
    renamed("stop_sequences", "stop", [], on="native completions chat"),
    renamed("stop", "stop_sequences", [], on="messages"),
    refused("stop", [], on="responses", why=NOT_HERE),
    refused("stop_regex", "", []),
    refused(
        "include_stop_str_in_output",
        True,
        on="native",
        why="must be true: a text of this route keeps the stop string that ended it",
    ),
    renamed("ignore_eos", "ignore_eos_token", False, on="native"),
    renamed("ignore_eos_token", "ignore_eos", False, on=OPENAI),
    refused("task_budget", on="output_config", why="is not supported: `max_tokens` is the only limit"),
    # Fields about reasoning.
    refused("thinking_token_budget", on="native completions responses messages"),
    renamed("thinking_token_budget", "max_thinking_tokens", on="chat"),
    renamed("thinking_budget_tokens", "max_thinking_tokens", -1, on="chat"),
    refused("max_thinking_tokens", on="messages", why=send("`thinking`")),
    refused("reasoning", on="chat", why=send("`reasoning_effort`")),
    refused("reasoning_effort", "none", on="responses", why=send("`reasoning`")),
    refused("reasoning_effort", "none", on="messages", why=send("`output_config`")),
    tolerated("include_reasoning separate_reasoning", "reasoning is part of the text", on=TEXTS),
    refused("include_reasoning separate_reasoning", True, on=OTHER_CHATS, why=OF_CHATS),
    tolerated("stream_reasoning stream_reasoning_steps", "reasoning is part of the text", on=TEXTS),
    tolerated("stream_reasoning stream_reasoning_steps", "reasoning is sent while it is made", on=CHATS),
    refused("mode", "standard", on="responses.reasoning"),
    tolerated("summary generate_summary", "the reasoning itself is part of the answer", on="responses.reasoning"),
    tolerated("context", "the chat template says which reasoning is part of the prompt", on="responses.reasoning"),
    tolerated("encrypted_content", "only the server that has made it can read it", on="items.reasoning"),
    refused("block_binding", on="thinking", why="is not supported: thinking is not signed"),
    # Fields that say what the answer contains besides its text.
    refused("modalities", ["text"], on="chat"),
    renamed("logprobs", "top_n_tokens", False, 0, on="native"),
    refused("logprobs", False, on="responses", why=send("`include`")),
    refused("logprobs", False, on="messages", why=NOT_HERE),
    renamed("top_logprobs", "top_n_tokens", 0, on="native"),
    renamed("top_logprobs top_n_tokens", "logprobs", 0, on="completions"),
    refused("top_logprobs", 0, on="messages", why=NOT_HERE),
    renamed("top_n_tokens", "top_logprobs", 0, on="chat"),
    refused("n_probs", 0, why=send("`logprobs`")),
    refused("prompt_logprobs routed_experts_prompt_start"),
    refused("logprob_token_ids response_fields", []),
    refused("skip_special_tokens spaces_between_special_tokens", True),
    refused("return_token_ids return_tokens_as_token_ids return_token_offsets return_prompt_text", False),
    refused("return_hidden_states return_routed_experts return_mm_kwargs return_progress", False),
    refused("timings_per_token post_sampling_probs", False),
    refused("return_full_text", False, on=OPENAI, why=send("`echo`")),
    refused("decoder_input_details", False, on=OPENAI, why=send("`prompt_logprobs`")),
    tolerated("details", "the details are always part of the answer", on=OPENAI),
    # Fields that say how the request is served.
    refused("store", False, on="native completions chat messages", why="is not supported: answers are not stored"),
    refused("store", False, on="responses", why="is not supported: answers are not stored, leave the field out"),
    refused("background", False, on="responses", why="is not supported: keep the connection, or send `stream`"),
    tolerated("background_options", "has no effect without `background`", on="responses"),
    refused("fallbacks", [], on="messages", why="is not supported: the server has one model"),
    refused("fallback_credit_token", on="messages", why="is not supported: the server has one model"),
    refused("inference_geo", on="messages", why="is not supported: choose a server in that region"),
    tolerated("prompt_cache_key prompt_cache_retention prompt_cache_options cache_prompt", CACHED),
    tolerated(
        "cache_control", CACHED, on="messages chat.tools messages.tools blocks.text blocks.tool_use blocks.tool_result"
    ),
    tolerated("id_slot", "the prefix cache is not divided into slots"),
    tolerated("session_id", "the prefix cache finds what a session has in common"),
    tolerated("user safety_identifier", "names the end user, which nothing here depends on"),
    tolerated("user_profile_id", "names the end user, which nothing here depends on", on="messages"),
    tolerated("metadata", "is stored with a stored answer, and nothing is stored here"),
    tolerated("moderation", "nothing is moderated here"),
    tolerated("service_tier", "there is one tier"),
    tolerated("request_id rid", "the request's id is that of the header X-Request-Id"),
    tolerated("stream_interval", "every token is sent at once"),
    tolerated("include_obfuscation", "events are not padded", on="stream_options"),
    tolerated("client_metadata", "the client's own notes", on="responses"),
    tolerated("access_programs", "there are no such programs here", on="responses"),
    tolerated("id", "items are not stored", on="items"),
    tolerated("status", "an item stands as it is", on="items"),
    tolerated("phase", "the chat template knows no phases", on="items"),
    tolerated("billing_policy", "nothing is billed here", on="messages"),
    tolerated("workspace_id", "there is one workspace", on="messages"),
    tolerated("speed", "there is one speed", on="messages"),
    tolerated("betas anthropic_beta", "a feature is asked for by its own field", on="messages"),
    tolerated("anthropic_version", "there is one version", on="messages"),
)


def _by_place() -> dict[str, dict[str, Rule]]:
    rules: dict[str, dict[str, Rule]] = {place: {} for place in PLACES.split()}
    for names, places, rule in TABLE:
        of_row = dict.fromkeys(names.split(), rule)
        for place in places.split():
            rules[place] |= of_row
    return rules


RULES = _by_place()
