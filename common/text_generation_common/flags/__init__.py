"""The flags of all programs, each declared once. Imports the standard library and the errors of the common package.

Begin with `declaration.py`: what a flag is, and how groups of flags make a command line. `programs.py` says where a
program differs, `kinds.py` has the types of values; the other files are groups.
"""
