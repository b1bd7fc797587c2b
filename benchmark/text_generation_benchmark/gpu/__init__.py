"""`make gpu-check`: the kernels, their speed and the whole server on a GPU, in one call of a few minutes.

`check` runs the stages, each in a process of its own; a stage yields findings; `results` writes them down.
"""
