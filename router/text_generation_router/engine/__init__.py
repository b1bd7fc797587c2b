"""The engine: the loop that drives the shards, and the rooms beside it."""
