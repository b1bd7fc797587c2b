"""Imports whose objects last as long as the process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting() -> Iterator[None]:
    """For imports of large packages. Python's collector does not run meanwhile, which takes a sixth of their processor
    time, and does not look at the objects that they have made later.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
