"""Servers without a model, for measurements: pretended shards, and a reader of many streams."""
