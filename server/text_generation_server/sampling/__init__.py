"""From logits to the next tokens of a whole batch at once."""
