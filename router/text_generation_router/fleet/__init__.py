"""A front's engines in other processes: where its requests are, which engine gets which, and what becomes of them when
an engine is lost.

`engine.py` is these engines as one; `books.py` is pure, and knows every request. What is decided without input, output
or a clock (`choice.py`, `cache_index.py`, `suspects.py` and more) is listed as pure in `pyproject.toml`. Imports
`wire/` and values of `scheduling/`; no text, no shards.
"""
