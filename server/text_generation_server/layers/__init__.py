"""Parts of models: linear layers, embedding and head, rotary tables. Norms, attention and activations are kernels."""
