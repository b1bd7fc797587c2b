"""Where our readers of calls and vLLM's differ, by the text's label in call_texts.py, and why ours read it so."""

_REASONS = {
    "Arguments that break off are given as the model has written them, as they were in the stream. vLLM's stream "
    "gives them too; its whole answer has no call, or closes the arguments, or leaves them out.": (
        "hermes: cut off in a string",
        "hermes: cut off in the end marker",
        "llama3: cut off",
        "llama4: cut off in a string",
        "llama4: cut off after a call",
        "llama4: cut off before the end",
        "llama4: cut off in a number",
        "lfm2: cut off",
        "olmo3: cut off",
        "qwen3-coder: cut off in a string",
        "qwen3-coder: cut off in a number",
        "seed-oss: cut off",
        "minimax-m2: cut off",
        "glm45: cut off",
        "mistral-list: cut off in the second call",
        "mistral-list: cut off after a comma",
        "deepseek-v3: cut off",
        "deepseek-v31: cut off",
        "phi4-mini: cut off",
    ),
    "A marker inside a string of the arguments belongs to the string. vLLM takes it for the end of the call, and "
    "the call is lost or cut.": (
        "hermes: markers and braces in strings",
        "olmo3: markers in strings",
        "lfm2: markers in strings",
        "qwen3-coder: values of several lines with quotes, tags and braces",
        "glm45: values with tags, braces and line breaks",
        "mistral-list: brackets and markers in strings",
        "mistral-args: braces and markers in strings",
        "deepseek-v31: markers in strings",
        "kimi-k2: markers in strings",
        "phi4-mini: markers in strings",
        "llama4: brackets, quotes and markers in strings",
    ),
    "A call is found after other text, and text after it is kept. vLLM looks for one at the beginning of the "
    "answer only, or loses all calls with the first text that does not fit.": (
        "llama3: text before and after",
        "llama4: text before and after",
    ),
    "Reasoning may follow a call, and calls may follow in the answer. vLLM's reader for DeepSeek R1 takes the first "
    "reasoning only, and its reader for Hermes no text after a call.": ("hermes: reasoning again after a call",),
    "Text after a marker that is not a call is text of the answer. vLLM drops it, or calls a tool of a part of a "
    "name.": (
        "seed-oss: no tool",
        "minimax-m2: no tool",
        "glm45: no tool",
        "mistral-list: an empty list",
        "mistral-args: cut off in the name",
    ),
    "Without a marker, only the request's tools are called: other JSON, or a list, is an answer. vLLM calls any "
    "name.": (
        "llama3: an answer in JSON",
        "llama4: a tool that the request does not have",
    ),
    "Olmo 3 writes calls between markers; lines of code without them are an answer. vLLM reads them as calls.": (
        "olmo3: no call",
    ),
    "A call inside reasoning ends it, as in vLLM's readers for Qwen3 and GLM. Its reader for DeepSeek R1, which "
    "is used here, has no calls in reasoning.": ("hermes: a call within reasoning ends it",),
    "Arguments in a string are taken out of it, and null or no arguments are an empty object. vLLM gives the "
    "string with its quotes, and loses all calls if one has no arguments.": (
        "hermes: arguments in a string, and none",
    ),
    "Line breaks within strings become escapes, so that clients can read the arguments. vLLM loses the call.": (
        "hermes: a line break in a string",
    ),
    "Arguments that are not JSON or not a literal are given as they are, up to the next marker, because the call "
    "has begun in the stream. In vLLM's whole answer no call is left.": (
        "hermes: arguments that are not JSON, then a call",
        "llama4: an argument that is not a literal",
        "llama4: a number that is larger than any float",
    ),
    "A new call's marker ends a call that lacks its own end. vLLM gives the first call only.": (
        "qwen3-coder: a call without its end",
    ),
    "[CALL_ID] stands between a name and an identifier. vLLM joins both to one name.": (
        "mistral-args: two calls, one with an id",
    ),
    "No arguments are an empty object. vLLM gives an empty text, which is not JSON.": ("deepseek-v31: no arguments",),
    "Phi-4-mini writes <|tool_call|> as its tokenizer has it, and `functools` by prompt. vLLM knows the second only.": (
        "phi4-mini: one call",
        "phi4-mini: text before and after",
        "phi4-mini: one object without a list",
    ),
}
DIFFERENCES = {label: reason for reason, labels in _REASONS.items() for label in labels}
