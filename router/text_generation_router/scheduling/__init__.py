"""Decides which tokens are computed next, and in which slots. Without I/O, clock or torch.

Of this repository it imports the common package only. Begin with `scheduler.py`, then `running.py`, a request's
progress, and `memory/`.
"""
