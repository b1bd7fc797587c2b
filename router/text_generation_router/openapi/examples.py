"""Bodies that the document shows as examples of the routes. Each of them runs."""

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
SUM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
NATIVE_EXAMPLES = {
    "The most likely text": {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}},
    "Drawn, with details": {
        "inputs": PROMPT,
        "parameters": {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7, "seed": 1, "details": True},
    },
    "JSON by a schema": {"inputs": PROMPT, "parameters": {"grammar": {"type": "json", "value": SUM}}},
}
COMPLETION_EXAMPLES = {
    "One text": {"prompt": PROMPT, "max_tokens": 8},
    "A stream": {"prompt": PROMPT, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}},
    "Log-probabilities": {"prompt": [PROMPT], "max_tokens": 4, "temperature": 0, "logprobs": 2},
    "One of several texts": {"prompt": PROMPT, "structured_outputs": {"choice": [" Paris", " London"]}},
}
CHAT_EXAMPLES = {
    "A question": {"messages": MESSAGES, "max_tokens": 8},
    "A stream": {"messages": MESSAGES, "max_tokens": 8, "stream": True},
    "Several answers": {"messages": MESSAGES, "max_tokens": 4, "n": 2, "temperature": 0.7, "seed": 1},
    "JSON by a schema": {
        "messages": MESSAGES,
        "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}},
    },
}
RESPONSES_EXAMPLES = {
    "A question": {"input": "What is 2 + 3?", "max_output_tokens": 8},
    "A stream": {"input": "What is 2 + 3?", "max_output_tokens": 8, "stream": True},
    "A function's result": {
        "instructions": "Be short.",
        "input": [
            *MESSAGES,
            {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 2, "b": 3}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "5"},
        ],
        "max_output_tokens": 8,
        "include": ["message.output_text.logprobs"],
    },
}
MESSAGES_EXAMPLES = {
    "A question": {"messages": MESSAGES, "max_tokens": 8},
    "A stream": {"messages": MESSAGES, "max_tokens": 8, "stream": True},
    "A tool's result": {
        "system": [{"type": "text", "text": "Be short."}],
        "messages": [
            *MESSAGES,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2, "b": 3}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "5"}]},
        ],
        "max_tokens": 8,
        "stop_sequences": ["."],
    },
}
