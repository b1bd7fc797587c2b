"""Measures the server, beside a peer or a physical limit taken in the same run."""
