"""The machine a shard runs on: memory, cores, copies between host and device, moments and recorded steps."""
