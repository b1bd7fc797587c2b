"""Parts of models: linear layers and their weights, embedding and head, rotary tables. Norms, attention and activations
are kernels. Imports `kernels/`, `device/` and ranks. Begin with `linear.py`.
"""
