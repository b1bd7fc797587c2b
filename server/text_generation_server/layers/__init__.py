"""What models are made of: linear layers, the two ends at the vocabulary, rotary tables. Norms, attention and
activations are kernels."""
