"""Quantized weights. Begin with `values.py`, the forms in which linear layers keep weights.

Launcher and router read what formats say without torch: `values.py` names its types only.
"""
