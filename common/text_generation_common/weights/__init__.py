"""The weights files of a model's folder: which files there are, and what their headers say. No tensor is read."""
