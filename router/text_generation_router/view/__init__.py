"""What an engine shows of itself to its viewers: rows, queue, slots, prefix tree, steps. Pure: no input or output.

Reads the scheduler and changes nothing. There are numbers and reasons in it, tenants as digests, and neither token ids
nor texts. `engine/watching.py` makes a state of it while it is watched. Begin with `values.py`.
"""
