"""Decides which tokens are computed next, and in which slots. Without I/O, clock or torch. Imports no other package of
this repository.
"""
