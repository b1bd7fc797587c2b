"""Declarations of flags: groups within groups, names, values that programs change, environment variables."""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

import math
from dataclasses import dataclass
from enum import StrEnum

import pytest
from typer.testing import CliRunner

from text_generation_common.flags import process
from text_generation_common.flags.declaration import (
    REQUIRED,
    VariableError,
    borrowed,
    flag,
    flags_of,
    from_environment,
    from_values,
    missing_features,
    unsupported_choices,
    values_of,
    with_flags,
    without_effect,
    wrong_numbers,
)
from text_generation_common.flags.programs import ProgramFlags
from text_generation_common.typer_command import make_app, taking


class Colour(StrEnum):
    red = "red"
    blue = "blue"
    green = "green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    names: tuple[str, ...] = flag((), "Names.", secret=True)
    colour: Colour | None = flag(None, "The colour.", supported=(Colour.red, Colour.blue))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    count: int = flag(REQUIRED, "How many.", short="-c", min=0, max=9, positive=True)
    inner: Inner = Inner()
    ratio: float = flag(0.5, "The ratio.", env="RATIO_OF_ALL", no_effect="nothing is divided")
    caching: bool = flag(True, "Whether to cache.")
    ngrok: bool = flag(False, "Not supported yet.", env=False, refused_except=(False,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    colour: Colour | None = borrowed(Inner, "colour")


PLAIN = ProgramFlags(changes={})


def given(program: ProgramFlags, *words: str, **variables: str) -> Outer | str:
    """The result of a command line: the values, or the error's text."""
    seen: list[Outer] = []
    app = make_app()
    app.command()(taking(lambda values: seen.append(from_values(Outer, values)), program, Outer))
    result = CliRunner().invoke(app, list(words), env=variables)
    return seen[0] if seen else result.output


def test_flags_of_groups_stand_in_the_order_of_the_fields():
    assert [each.name for each in flags_of(Outer)] == ["count", "names", "colour", "ratio", "caching", "ngrok"]


def test_a_command_line_becomes_nested_values():
    assert given(PLAIN, "-c", "3") == Outer(count=3)
    words = ("--count", "3", "--names", "a", "--names", "b", "--colour", "red", "--no-caching")
    assert given(PLAIN, *words) == Outer(count=3, inner=Inner(names=("a", "b"), colour=Colour.red), caching=False)
    assert given(PLAIN, COUNT="2", NAMES="a b", RATIO_OF_ALL="0.25") == Outer(
        count=2, inner=Inner(names=("a", "b")), ratio=0.25
    )


@pytest.mark.parametrize("words", [(), ("--count", "-1"), ("--count", "1", "--colour", "black"), ("--count", "x")])
def test_wrong_usage_is_refused(words):
    assert "Error: " in str(given(PLAIN, *words))


def test_a_program_states_what_differs():
    program = ProgramFlags(
        changes={"count": {"default": 7, "short": None, "type": float}}, has_variables=False, checks_choices=False
    )
    assert given(program, "--colour", "green", COUNT="2") == Outer(count=7.0, inner=Inner(colour=Colour.green))
    assert given(program, "--count", "1.5") == Outer(count=1.5)
    assert "Invalid value for" in str(given(program, "--count", "-1.5"))
    assert "No such option" in str(given(program, "-c", "1"))


def test_secrets_are_not_shown():
    assert "hush" not in repr(Inner(names=("hush",)))


def test_values_change_wherever_their_group_is():
    config = with_flags(Outer(count=1), names=["a"], colour="blue", count=2)
    assert config == Outer(count=2, inner=Inner(names=("a",), colour=Colour.blue))
    assert from_values(Outer, values_of(config)) == config
    with pytest.raises(TypeError, match="colours"):
        with_flags(config, colours=1)


def test_a_borrowed_flag_is_the_group_s():
    (of_group,) = (each for each in flags_of(Inner) if each.name == "colour")
    assert list(flags_of(Other)) == [of_group]


def test_checks_name_the_flags_that_they_are_about():
    def found(**values: object) -> tuple[list[str], ...]:
        flags, all_values = list(flags_of(Outer)), values_of(with_flags(Outer(count=1), **values))
        return (
            [each.flag_name for each in missing_features(flags, all_values)],
            [each.flag_name for each in unsupported_choices(flags, all_values)],
            list(without_effect(flags, all_values)),
            list(wrong_numbers(flags, all_values)),
        )

    assert found() == ([], [], [], [])
    assert found(ngrok=True) == (["--ngrok"], [], [], [])
    assert found(colour="green") == ([], ["--colour"], [], [])
    assert found(ratio=0.75) == ([], [], ["--ratio has no effect: nothing is divided"], [])
    assert found(count=0) == ([], [], [], ["`count` must be > 0"])
    for endless in (math.inf, math.nan):
        assert found(ratio=endless)[3] == ["`ratio` must be a finite number"]


def test_variables_are_read_by_type_or_parser():
    def doubled(text: str) -> int:
        return 2 * int(text)

    environ = {"COUNT": "4", "RATIO_OF_ALL": "0.25", "COLOUR": ""}
    assert from_environment(Outer, environ, {"count": doubled}) == Outer(count=8, ratio=0.25)
    with pytest.raises(VariableError, match="COUNT has the value 'x', which is not usable"):
        from_environment(Outer, {"COUNT": "x"}, {})
    for number, told in (("-1", "it must be at least 0"), ("10", "it must be at most 9")):
        with pytest.raises(VariableError, match=f"COUNT has the value '{number}', which is not usable: {told}"):
            from_environment(Outer, {"COUNT": number}, {})
    with pytest.raises(VariableError, match="it must be at most 9"):
        from_environment(Outer, {"COUNT": "5"}, {"count": doubled})


def test_help_is_plain_and_has_a_short_name():
    app = make_app()
    app.command()(taking(lambda values: None, PLAIN, Outer))
    for word in ("-h", "--help"):
        result = CliRunner().invoke(app, [word])
        assert result.exit_code == 0 and result.output.startswith("Usage: ") and "How many." in result.output


def test_without_an_endpoint_nothing_is_needed(monkeypatch):
    monkeypatch.setattr(process, "MODULES", ("no_such_package.trace",))
    assert process.tracing_refusal(None) is None


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4317", "grpc://localhost:4317", "http://", "http://h:99999", "http://h:0"]
)
def test_an_endpoint_without_scheme_host_or_valid_port_is_refused_by_name(endpoint):
    reason, hint = process.tracing_refusal(endpoint)
    assert reason == f"--otlp-endpoint {endpoint} is not an address" and "http://HOST:PORT" in hint


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    for missing in ("no_such_package.trace", "json.no_such_module"):
        monkeypatch.setattr(process, "MODULES", (missing,))
        reason, hint = process.tracing_refusal("http://localhost:4317")
        assert "not installed" in reason and hint == "pip install 'tgi-py[otlp]'"


def test_packages_that_are_there_and_an_address_are_enough(monkeypatch):
    monkeypatch.setattr(process, "MODULES", ("json.decoder",))
    for endpoint in ("http://localhost:4317", "https://collector", "http://[::1]:1"):
        assert process.tracing_refusal(endpoint) is None
