"""Makes a model's files ready: downloads them, converts weights and tokenizers, and reads safetensors. Imports the
common package and errors; the hub's client and torch only where they are used. Begin with `prepare.py` and `files.py`.
"""
