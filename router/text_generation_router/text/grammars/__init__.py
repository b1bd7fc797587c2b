"""Grammars of a text's form: what a request asks for, converted for llguidance and checked in a child process.

The router itself never loads llguidance, which may crash: `checking.py` runs in the router, `checking_child.py` and
what it imports in the child. A grammar at which llguidance crashes, or takes more than 1 s of processor time or 128
MiB, is refused by a GrammarError that follows from the status of the child. Its owner waits until there is a new child;
others use the other one. A text at which two children died is refused at once for 10 minutes (`DeadlyTexts`). A job
whose child was killed from outside (`JobLostError.is_own_fault`) is done by another child, once.

Begin with `checking.py`.
"""
