"""Micro-benchmarks: what one part of the server takes, measured alone."""
