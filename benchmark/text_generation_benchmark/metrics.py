"""Reads a page of Prometheus metrics."""


def metric(page: str, series: str) -> float:
    """The value of one series, e.g. `tgi_request_failure{err="dropped"}`; 0 if the page does not have it."""
    _, found, rest = f"\n{page}".partition(f"\n{series} ")
    return float(rest.partition("\n")[0]) if found else 0.0
