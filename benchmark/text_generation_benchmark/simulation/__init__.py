"""Simulates the router's own scheduler with a cost model of a step: hours of traffic in minutes, without a GPU."""
