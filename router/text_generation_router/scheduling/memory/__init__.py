"""Token memory: free slots, the prefix cache, and the slots and cached prefixes that each request holds.

Imports nothing else of `scheduling/`. Begin with `memory.py`, the way in for the scheduler, then `slots.py` and
`prefix_cache.py`.
"""
