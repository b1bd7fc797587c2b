"""The machine that a shard runs on: memory, copies between host and device, points in the device's work, recorded
steps. Imports errors and the common package only. Begin with `transfers.py`, then `graphs.py`.
"""
