"""docs/from-tgi.md: every flag of TGI's launcher, and what is said of it, beside the flags of our own launcher."""

import re
from collections.abc import Iterator

import pytest
from manifests import REPOSITORY

from text_generation_common.flags.declaration import Flag
from text_generation_common.flags.programs import LAUNCHER
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.tests.test_launcher_flags import OTHER_FLAGS, TGI_FLAGS

PAGE = (REPOSITORY / "docs" / "from-tgi.md").read_text()
OURS = {flag.flag_name: flag for flag in LAUNCHER.flags_of(LauncherConfig)}


def rows() -> Iterator[tuple[str, str]]:
    """Each flag of the page's table, and what it is here."""
    for names, here in re.findall(r"^\| ((?:`--[\w-]+` ?)+) \| ([a-z ]+) \|", PAGE, re.MULTILINE):
        for name in re.findall(r"`(.+?)`", names):
            yield name, here


def told_of(flag: Flag) -> str:
    """What the page has to say of a flag."""
    default = TGI_FLAGS.get(flag.flag_name.removeprefix("--"), flag.default)
    if flag.refused_except is not None:
        return "refused"
    if flag.no_effect is not None and flag.unless is None:
        return "no effect"
    if flag.supported is not None:
        return "fewer values"
    differs = flag.name in ("model_id", "shard_uds_path") or default != (flag.default if flag.default != () else None)
    return "other default" if differs else "same"


def test_the_page_has_each_of_tgi_s_flags_once() -> None:
    named = [name for name, _ in rows()]
    assert sorted(named) == sorted(f"--{name}" for name in TGI_FLAGS | OTHER_FLAGS)


@pytest.mark.parametrize(("name", "here"), list(rows()))
def test_the_page_says_what_the_launcher_does_with_a_flag(name: str, here: str) -> None:
    assert here == told_of(OURS[name])


def test_the_variables_that_the_page_names_are_those_of_flags_or_read_elsewhere() -> None:
    section = PAGE.partition("## Variables")[2].partition("\n## ")[0]
    read = {flag.variable for flag in OURS.values()} | {"HF_TOKEN", "HF_API_TOKEN", "HF_HOME", "HF_HUB_OFFLINE"}
    read |= set(re.findall(r"\$\{(\w+)", (REPOSITORY / "deploy" / "entrypoint.sh").read_text()))
    read |= {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LOG_LEVEL"}
    for line in section.splitlines():
        if "not read" in line or line.startswith("  "):
            continue
        assert set(re.findall(r"`([A-Z][A-Z_]+)`", line)) <= read, line
