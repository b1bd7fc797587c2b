"""`make gpu-check`: the table of kernel tests, the steps, whole servers and a roofline on a GPU, by pytest.

`checks/` has the tests that only a GPU can answer. Without a GPU they run with small sizes, as part of `make test`.
"""
