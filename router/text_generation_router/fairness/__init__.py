"""Equal shares of owners and their tenants: of threads, child processes and places (`slots.py`), and of the turns of
the event loop (`loop_turns.py`). Imports `Share` of `scheduling/` and errors.
"""
