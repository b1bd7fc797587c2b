"""Grammars of a text's form: what a request asks for, converted for llguidance and checked in a child process.

The router itself never loads llguidance: `checking.py` runs in the router, `checking_child.py` and what it imports in
the child.
"""
