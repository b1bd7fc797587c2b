"""Grammars: the tokens of a request with a grammar are only those that its grammar allows. Imports `step/` and
`device/`. Begin with `constraints.py`; `compiler.py` makes the matchers.
"""
