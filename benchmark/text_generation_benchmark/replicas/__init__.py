"""Simulates fronts and replicas, with the router's own scheduler in each engine and its own choice in each front."""
