"""What several programs share: flags, errors, what files say of a model, and the lines between processes.

Imports none of the programs, and neither torch nor transformers; typer only in `typer_command.py`, gRPC only in
`cluster/security.py`. Begin with `errors.py`, the tree of errors, and `sampling.py`, the parameters of a request.
"""
