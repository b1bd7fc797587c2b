"""The weights files of a model's folder, and its tokenizer: which files there are, and what their headers say. No
tensor is read. Imports errors and readers of small files of the common package.

Begin with `names.py`, which files there are, and `headers.py`.
"""
