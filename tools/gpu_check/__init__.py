"""`make gpu-check`: checks the kernels, their speed and the whole server on a GPU, in a few minutes.

`check` runs the stages, each in a process of its own. A stage yields findings, and `results` writes them to files.
"""
