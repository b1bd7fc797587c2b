"""What config.json says of a model: the families that are served, as values from which the server builds a decoder, and
the tensors that such a model has. Imports errors, flags and headers of weights of the common package, and neither torch
nor transformers, so that the launcher can read it at once.

Begin with `architecture.py`, the values, and `families/llama.py`, one reader of a config.json.
"""
