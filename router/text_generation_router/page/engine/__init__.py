"""The engine view: routes below /engine, access to them, and what a front keeps for them.

They never get a CORS header. Begin with `access.py`, then `routes.py`.
"""
