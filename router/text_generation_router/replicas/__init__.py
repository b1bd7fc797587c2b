"""What fronts and engines decide about several replicas: which blocks are cached where, which engine gets a request,
and what follows a loss. Pure: no input or output and no clock; times are arguments.
"""
