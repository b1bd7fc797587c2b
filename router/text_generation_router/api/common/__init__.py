"""What the dialects share: bodies read and checked, permits, generations, the headers and parts of answers.

Imports no dialect: each dialect's `fields.py` makes its kinds of bodies with `body_kinds.py`. Begin with `answer.py`,
the steps from a request to its answer. What each field means on each route is in `contract.py` and `known_fields.py`.
"""
