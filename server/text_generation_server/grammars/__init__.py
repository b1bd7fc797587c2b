"""Grammars: the tokens of a request with a grammar are only those that its grammar allows."""
