"""Turns the tensors of a quantized layer into a value of `values.py`, and such values into parts for ranks. The only
folder of `quantized` that imports torch: shards alone import it. Begin with `reading.py`.
"""
