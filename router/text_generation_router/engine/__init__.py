"""The engine: the loop that drives the shards, and the requests, epochs and connections that it needs for that.

Sees token ids only. Imports `scheduling/`, and neither `text/`, `http/` nor `api/`. Begin with `protocol.py`, what a
front asks of an engine, then `local.py`, the engine put together, and `loop.py`.
"""
