"""The engine: the loop that drives the shards, and the modules that it uses."""
