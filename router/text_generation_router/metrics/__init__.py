"""What operators see: the metrics and their page, joined over the processes of a server, and traces.

Begin with `metrics.py`, which has every instrument.
"""
