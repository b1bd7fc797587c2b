"""Runs in a virtual environment with vLLM: reads texts as JSON from the standard input, and writes what vLLM's readers
of reasoning and of calls make of each.

A text is whole, or given token by token. Its tokenizer has bytes as tokens, and the markers of its format as special
tokens, as vLLM's readers demand."""

import json
import logging
import sys
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

TOOL_PARSERS = {
    "deepseek-v3": "deepseek_v3", "deepseek-v31": "deepseek_v31", "glm45": "glm45", "granite": "granite",
    "hermes": "hermes", "kimi-k2": "kimi_k2", "lfm2": "lfm2", "llama3": "llama3_json", "llama4": "llama4_pythonic",
    "minimax-m2": "minimax_m2", "mistral-args": "mistral", "mistral-list": "mistral", "olmo3": "olmo3",
    "phi4-mini": "phi4_mini_json", "qwen3-coder": "qwen3_coder", "seed-oss": "seed_oss",
}  # fmt: skip
REASONING_PARSERS = {"granite": "granite", "mistral": "mistral", "seed-oss": "seed_oss", "think": "deepseek_r1"}
# Readers that read reasoning of their format themselves.
OWN_REASONING = {"glm45": "glm45", "kimi-k2": "kimi_k2", "minimax-m2": "minimax_m2", "qwen3-coder": "qwen3"}


def make_tokenizer(markers: list[str]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.add_special_tokens({"additional_special_tokens": markers})
    return made


def request_of(tools: dict[str, Any]) -> ChatCompletionRequest:
    listed = [{"type": "function", "function": {"name": name, "parameters": tools[name]}} for name in tools]
    return ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=listed)


def parsed(case: dict[str, Any]) -> dict[str, Any]:
    tokenizer = make_tokenizer(case["markers"])
    request = request_of(case["tools"])
    text, reasoning = case["text"], None
    if case["reasoning_markers"]:
        name = OWN_REASONING.get(case["format"]) or REASONING_PARSERS[case["reasoning_format"]]
        parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
        reasoning, text = parser.extract_reasoning(text, request)
    found = {"reasoning": reasoning or "", "content": text or "", "calls": []}
    if text:
        tool_parser = ToolParserManager.get_tool_parser(TOOL_PARSERS[case["format"]])(tokenizer, request.tools)
        calls = tool_parser.extract_tool_calls(text, request)
        found["content"] = calls.content or ""
        found["calls"] = [(call.function.name, call.function.arguments) for call in calls.tool_calls]
    return found


def main() -> None:
    logging.disable(logging.CRITICAL)
    answers = []
    for case in json.load(sys.stdin):
        if case["format"] not in TOOL_PARSERS:
            answers.append({"missing": True})
            continue
        try:
            answers.append(parsed(case))
        except Exception as error:  # any error of the peer is an answer of its own
            answers.append({"error": f"{type(error).__name__}: {error}"[:200]})
    json.dump(answers, sys.__stdout__)


if __name__ == "__main__":
    main()
