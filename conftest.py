"""For all tests: the log of a program ends with the test that called it, and Python's collector skips what stays."""

import gc
import logging


def pytest_collection_finish() -> None:
    """What modules and collected tests are made of stays to the end: no later collection of garbage looks at it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # Python's last collection would skip frozen objects, too, and libraries report them as leaks


def pytest_runtest_teardown() -> None:
    """A program that a test calls in its own process writes its log to a stream that ends with the test."""
    for handler in logging.root.handlers[:]:
        if type(handler) is logging.StreamHandler:  # pytest's own are of classes made of it
            logging.root.removeHandler(handler)
            logging.root.setLevel(logging.WARNING)
