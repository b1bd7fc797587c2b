"""The values of one step: the rows and parameters it starts from, its plan, its tensors and its result.

The models and the sampler import from here, and nothing here imports from them. Begin with `rows.py`, then
`preparation.py`, ids turned into rows, and `layout.py`.
"""
