"""GGUF, the files of llama.cpp and Ollama: one file has a model's weights, settings, tokenizer and chat template.

Begin with `container.py`, what the header of a file says, and `side_files.py`, which makes of it the small files that
other models have beside their weights. Nothing is written to the disk. Imports errors and names of files only, and no
torch.
"""
