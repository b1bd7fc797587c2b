"""Measures the server, and in the same run a peer (another server) or a physical limit to compare with."""
