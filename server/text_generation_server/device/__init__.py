"""The machine that a shard runs on: memory, cores, copies between host and device, points in the device's work,
recorded steps.
"""
