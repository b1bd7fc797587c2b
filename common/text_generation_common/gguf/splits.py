"""How a byte-level tokenizer splits a text before it joins bytes to tokens. A file only names the way
(`tokenizer.ggml.pre`); what the names mean is a table here, with the names of llama.cpp.

Where llama.cpp has changed a pattern because its own regular expressions lack something, the pattern here is the one of
the original tokenizers: docs/gguf.md lists the differences.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# How to split further is a pattern, each of whose matches becomes a piece, or a step of tokenizer.json.
Step = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Splitting:
    steps: tuple[Step, ...]
    whole_words: bool = False  # a piece that is a token becomes that token, whatever the merges say
    adds_bos: bool = False  # where the file does not say it


DIGITS: Step = {"type": "Digits", "individual_digits": True}
PUNCTUATION: Step = {"type": "Punctuation", "behavior": "Contiguous"}
# Ends of the patterns of a family: what is neither a letter nor a digit.
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(end: str) -> str:
    """Words that end where a capital letter follows a small one."""
    return rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}"


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}{_SIGNS}"
QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}{_SIGNS}"
QWEN35 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}"
GPT4O = rf"{_cased(_SHORT + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
TEKKEN = rf"{_cased('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK_SIGNS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
# Letters that have a capital and a small form.
DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _SPACES
)

_LLAMA3 = Splitting((LLAMA3,), whole_words=True, adds_bos=True)
_DEEPSEEK3 = Splitting((r"\p{N}{1,3}", KANA, DEEPSEEK3))
_ROWS: Mapping[str, Splitting] = {
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": _LLAMA3,
    "dbrx smaug-bpe chatglm-bpe": Splitting((LLAMA3,)),
    "glm4": Splitting((LLAMA3,), whole_words=True),
    "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2": Splitting((QWEN2,)),
    "qwen35": Splitting((QWEN35,)),
    "deepseek-llm": Splitting(("[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_SIGNS, r"\s+$", HAN, r"\p{N}+")),
    "deepseek-coder": Splitting(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK3,
    "falcon": Splitting((PUNCTUATION, GPT2, "[0-9][0-9][0-9]")),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Splitting((DIGITS, GPT2)),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4": Splitting((GPT2,)),
    "poro-chat bloom gpt3-finnish": Splitting((BLOOM,)),
    "viking": Splitting((BLOOM, r"\p{N}")),
    "tekken": Splitting((TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o llama4 kanana2": Splitting((GPT4O,)),
    "tiny_aya cohere2moe": Splitting((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)),
    "minimax-m2": Splitting((GPT4O,)),
    "seed-coder": Splitting((rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}",)),
    "bailingmoe bailingmoe2 llada-moe": Splitting(
        (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
    ),
}
SPLITTINGS: Mapping[str, Splitting] = {name: row for names, row in _ROWS.items() for name in names.split()}
