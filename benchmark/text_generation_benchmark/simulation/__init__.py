"""The router's own scheduler replayed against a cost model of a step: hours of traffic in minutes, without a GPU."""
