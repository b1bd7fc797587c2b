"""What config.json says of a model: the families that are served, as values from which the server builds a decoder, and
the tensors that such a model has. Neither torch nor transformers is imported, so that the launcher can read it at once.
"""
