"""Child processes for work that would block the event loop or may never end. A child can be killed.

Of this repository it imports the common package only. Begin with `pool.py`, which keeps children and gives them jobs;
`child.py` is what runs in a child.
"""
