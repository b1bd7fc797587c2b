"""A shard: one process for each rank, with its part of the weights and all keys and values, which computes steps.

Imports the common package, and nothing of the router or launcher. Begin with `server.py` and `worker.py` (calls, and
steps in order), then `runner.py`, which computes one.
"""
