"""Samples the next tokens of a whole batch at once, from its logits."""
