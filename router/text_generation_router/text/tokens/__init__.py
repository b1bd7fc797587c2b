"""Texts as token ids, and token ids as text.

`tokenization.py` is the way in, `output.py` with `detokenization.py` and `stop_cutting.py` the way out; `pieces.py`
divides a text into answer, reasoning and calls.
"""
