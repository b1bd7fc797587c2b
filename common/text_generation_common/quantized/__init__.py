"""Quantized weights: which formats checkpoints have, how files store their layers, and the forms in which linear layers
keep weights. Imports errors, flags and readers of small files of the common package.

Begin with `values.py`, the forms, and `methods.py`, the settings of a checkpoint. Launcher and router read settings and
headers without torch: only `tensors/` imports it, for shards.
"""
