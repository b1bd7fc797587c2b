import pytest

from text_generation_common.flags import tracing


def test_without_an_endpoint_nothing_is_needed(monkeypatch):
    monkeypatch.setattr(tracing, "MODULES", ("no_such_package.trace",))
    assert tracing.refusal(None) is None


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4317", "grpc://localhost:4317", "http://", "http://h:99999", "http://h:0"]
)
def test_an_endpoint_without_scheme_host_or_valid_port_is_refused_by_name(endpoint):
    reason, hint = tracing.refusal(endpoint)
    assert reason == f"--otlp-endpoint {endpoint} is not an address" and "http://HOST:PORT" in hint


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    for missing in ("no_such_package.trace", "json.no_such_module"):
        monkeypatch.setattr(tracing, "MODULES", (missing,))
        reason, hint = tracing.refusal("http://localhost:4317")
        assert "not installed" in reason and hint == "pip install 'tgi-py[otlp]'"


def test_packages_that_are_there_and_an_address_are_enough(monkeypatch):
    monkeypatch.setattr(tracing, "MODULES", ("json.decoder",))
    for endpoint in ("http://localhost:4317", "https://collector", "http://[::1]:1"):
        assert tracing.refusal(endpoint) is None
