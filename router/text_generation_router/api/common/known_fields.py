"""The known fields that routes have in common: what fields of TGI, OpenAI, vLLM, SGLang and llama.cpp mean on routes
whose schema lacks them. `contract.py` explains the classes. Each dialect's `fields.py` has its own rules beside these.
"""

from text_generation_router.api.common.contract import Refused, Rule, Tolerated

Rules = dict[str, Rule]

FORM: Rules = dict.fromkeys(  # fields that set the form of the text
    (
        "grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
        "json_schema", "regex", "ebnf", "structural_tag", "custom_logit_processor", "custom_params",
        "repetition_detection",
    ),
    Refused(),
)  # fmt: skip
FORM["response_format"] = Refused(neutral=({"type": "text"},))
FORM["guided_whitespace_pattern"] = Refused("is not supported: white space is at most one space")
FORM["guided_decoding_backend"] = Tolerated("there is one engine for grammars")

WEIGHTS: Rules = dict.fromkeys(("adapter_id", "lora_path", "lora"), Refused())

TOOLS: Rules = {
    "tools": Refused(neutral=([],)),
    "tool_choice": Refused(neutral=("none", "auto")),
    "tool_prompt": Refused(neutral=("",)),
    "functions": Refused(neutral=([],)),
    "function_call": Refused(neutral=("none", "auto")),
    "parallel_tool_calls": Tolerated("there are no tool calls without `tools`"),
    "max_tool_calls": Tolerated("there are no tool calls without `tools`"),
}

PROMPT: Rules = {  # fields that change the prompt
    "chat_template": Refused("is not supported, because a template is a program; choose one with the server's flags"),
    "chat_template_kwargs": Refused(neutral=({},)),
    "documents": Refused(neutral=([],)),
    "truncate_prompt_tokens": Refused(),
    "truncation_side": Refused(),
    "echo": Refused(neutral=(False,)),
    "prompt_embeds": Refused(),
    "media_io_kwargs": Refused(neutral=({},)),
    "mm_processor_kwargs": Refused(neutral=({},)),
    "mm_payload": Refused(),
    "add_generation_prompt": Refused(neutral=(False,)),
    "continue_final_message": Refused(neutral=(False,)),
    "kv_transfer_params": Refused(),
    "ec_transfer_params": Refused(),
    "bootstrap_host": Refused(),
    "bootstrap_port": Refused(),
    "bootstrap_room": Refused(),
}

TOKENS: Rules = {  # fields that change the choice of tokens, or the end of the text
    "n": Refused(neutral=(1,)),
    "num_return_sequences": Refused(neutral=(1,)),
    "logits_processors": Refused(neutral=([],)),
    "use_beam_search": Refused("is not supported: there is no beam search, send `n` for several texts", (False,)),
    "length_penalty": Refused("is not supported: there is no beam search", (1, 1.0)),
    "early_stopping": Refused("is not supported: there is no beam search", (False,)),
    "stop_regex": Refused(neutral=("", [])),
    "no_stop_trim": Refused(neutral=(False,)),
    "sampling_seed": Refused("is not a field of this route, send `seed`"),
    "watermarking": Refused(neutral=(False,)),
    "thinking_token_budget": Refused(),
    "vllm_xargs": Refused(neutral=({},)),
    "dynatemp_range": Refused(neutral=(0, 0.0)),
    "dynatemp_exponent": Refused(neutral=(1, 1.0)),
    "xtc_probability": Refused(neutral=(0, 0.0)),
    "xtc_threshold": Refused("is not supported yet", (0.1,)),
    "dry_multiplier": Refused(neutral=(0, 0.0)),
    "dry_base": Tolerated("has no effect without `dry_multiplier`"),
    "dry_allowed_length": Tolerated("has no effect without `dry_multiplier`"),
    "dry_penalty_last_n": Tolerated("has no effect without `dry_multiplier`"),
    "dry_sequence_breakers": Tolerated("has no effect without `dry_multiplier`"),
    "mirostat": Refused(neutral=(0,)),
    "mirostat_tau": Tolerated("has no effect without `mirostat`"),
    "mirostat_eta": Tolerated("has no effect without `mirostat`"),
    "top_n_sigma": Refused(neutral=(-1, -1.0)),
    "samplers": Refused(),
}

ANSWER: Rules = {  # fields that change the content of the answer
    "prompt_logprobs": Refused(),
    "logprob_token_ids": Refused(neutral=([],)),
    "skip_special_tokens": Refused(neutral=(True,)),
    "spaces_between_special_tokens": Refused(neutral=(True,)),
    "return_token_ids": Refused(neutral=(False,)),
    "return_tokens_as_token_ids": Refused(neutral=(False,)),
    "return_token_offsets": Refused(neutral=(False,)),
    "return_prompt_text": Refused(neutral=(False,)),
    "return_hidden_states": Refused(neutral=(False,)),
    "return_routed_experts": Refused(neutral=(False,)),
    "return_mm_kwargs": Refused(neutral=(False,)),
    "routed_experts_prompt_start": Refused(),
    "return_progress": Refused(neutral=(False,)),
    "timings_per_token": Refused(neutral=(False,)),
    "post_sampling_probs": Refused(neutral=(False,)),
    "response_fields": Refused(neutral=([],)),
    "n_probs": Refused("is not a field of this route, send `logprobs`", (0,)),
}

NO_EFFECT: Rules = {  # fields that change no answer
    "user": Tolerated("names the end user, which nothing here depends on"),
    "metadata": Tolerated("is stored with a stored answer, and nothing is stored here"),
    "safety_identifier": Tolerated("names the end user, which nothing here depends on"),
    "moderation": Tolerated("nothing is moderated here"),
    "prompt_cache_key": Tolerated("every prompt is looked up in the prefix cache"),
    "prompt_cache_retention": Tolerated("every prompt is looked up in the prefix cache"),
    "prompt_cache_options": Tolerated("every prompt is looked up in the prefix cache"),
    "cache_prompt": Tolerated("every prompt is looked up in the prefix cache"),
    "id_slot": Tolerated("the prefix cache is not divided into slots"),
    "service_tier": Tolerated("there is one tier"),
    "session_id": Tolerated("the prefix cache finds what a session has in common"),
    "request_id": Tolerated("the request's id is that of the header X-Request-Id"),
    "rid": Tolerated("the request's id is that of the header X-Request-Id"),
    "stream_interval": Tolerated("every token is sent at once"),
    "include_reasoning": Tolerated("reasoning is part of the text"),
    "separate_reasoning": Tolerated("reasoning is part of the text"),
    "stream_reasoning": Tolerated("reasoning is part of the text"),
    "stream_reasoning_steps": Tolerated("reasoning is part of the text"),
    "store": Refused("is not supported: answers are not stored", (False,)),
}

COMMON: Rules = FORM | WEIGHTS | TOOLS | PROMPT | TOKENS | ANSWER | NO_EFFECT

OF_CHATS = "is not a field of this route, send the request to /v1/chat/completions"
# Chats, and the routes that are other forms of them; a chat has most of these fields.
OTHER_FORMS: Rules = {
    "chat_template_kwargs": Refused(OF_CHATS, ({},)),
    "documents": Refused(OF_CHATS, ([],)),
    "include_reasoning": Refused(OF_CHATS, (True,)),
    "separate_reasoning": Refused(OF_CHATS, (True,)),
    "tool_prompt": Refused(OF_CHATS, ("",)),
    "functions": Refused("is OpenAI's older form, send `tools`", ([],)),
    "function_call": Refused("is OpenAI's older form, send `tool_choice`", ("none", "auto")),
    "stream_reasoning": Tolerated("reasoning is sent while it is made"),
    "stream_reasoning_steps": Tolerated("reasoning is sent while it is made"),
    "max_tool_calls": Tolerated("limits tools that a server runs, and the client runs its own"),
}
