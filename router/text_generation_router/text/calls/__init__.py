"""Readers that turn a model's text into the answer, reasoning and calls of tools (`text/tokens/pieces.py`).

`formats.py` has the formats as data, `reading.py` makes readers of them, `reader.py` divides the
text, and the `…_body.py` files read what stands between the markers of calls.
"""
