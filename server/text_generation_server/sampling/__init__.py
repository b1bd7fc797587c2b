"""Samples the next tokens of a whole batch at once, from its logits. Imports `step/`, kernels and ranks, and no model.
Begin with `sampler.py`; `plan.py` makes its arguments.
"""
