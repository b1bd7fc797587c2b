"""For all tests: the log of a program ends with the test that called it; and the order in which files of tests begin.
What takes long begins first, so that no process of `make test` has a long file left when the others have none. How
many tests a file has says nothing about its seconds."""

import logging

import pytest

# Ends of paths, of files that take more than 10 s.
LONG = (
    "kernels/tests/test_triton_compiles.py",
    "gpu_check/tests/test_gpu_journal.py",
    "kernels/tests/test_kernels.py",
    "gpu_check/checks/test_server.py",
    "kernels/tests/test_sample.py",
    "tests/test_families.py",
    "tests/test_steps_on_a_gpu.py",
    "grammars/tests/test_schemas_followed.py",
    "grammars/tests/test_evil_grammars.py",
    "openapi/tests/test_cases.py",
    "demo_model/tests/test_demo_corpus.py",
    "replicas/tests/test_live.py",
    "integration-tests/test_chaos.py",
    "integration-tests/test_ctrl_c.py",
    "integration-tests/test_fronts.py",
    "integration-tests/test_attacks.py",
    "integration-tests/test_scheduling.py",
    "integration-tests/test_launch.py",
    "integration-tests/test_routes.py",
    "integration-tests/test_digest.py",
)


def place(path: str) -> int:
    return next((number for number, end in enumerate(LONG) if path.endswith(end)), len(LONG))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.path.as_posix()))


def pytest_runtest_teardown() -> None:
    """A program that a test calls in its own process writes its log to a stream that ends with the test."""
    for handler in logging.root.handlers[:]:
        if type(handler) is logging.StreamHandler:  # pytest's own are of classes made of it
            logging.root.removeHandler(handler)
            logging.root.setLevel(logging.WARNING)
