"""`text-generation-launcher certs`: what it writes, and that it overwrites nothing unasked."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from text_generation_common.cluster import files
from text_generation_common.cluster.block_key import read_key
from text_generation_common.cluster.certificates import read_certificates
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.issuing import Authority
from text_generation_launcher.cli import certs_command_line


def certs(*words: object, status: int = 0) -> str:
    """What the command prints."""
    result = CliRunner().invoke(certs_command_line(), [str(word) for word in words])
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result.output


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tls"


def test_each_role_on_each_host_gets_a_certificate_that_it_can_use(root):
    certs(root, "10.0.0.3", "*.engines.svc", "FD00::1", "--deployment", "blue")
    for role in Role:
        for host in ("10.0.0.3", "_.engines.svc", "fd00--1"):
            found = read_certificates(root / role / host, role)
            assert found.identity.uri == f"spiffe://blue/{role}"
            assert 364 <= (found.expires - datetime.now(UTC)).days < 365


def test_no_other_user_can_read_what_is_written(root):
    old = os.umask(0)
    try:
        certs(root, "10.0.0.3")
    finally:
        os.umask(old)
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_further_run_adds_hosts_with_the_same_ca_and_changes_nothing(root):
    certs(root, "10.0.0.3")
    before = contents(root)
    told = certs(root, "10.0.0.3", "10.0.0.4")
    after = contents(root)
    assert {name: after[name] for name in before} == before
    assert {name.rpartition("/")[0] for name in after.keys() - before.keys()} == {"front/10.0.0.4", "engine/10.0.0.4"}
    assert told.count("kept  ") == told.count("made  ") == 2
    assert read_certificates(root / "engine/10.0.0.4").ca == read_certificates(root / "front/10.0.0.3").ca


def test_renewing_replaces_what_is_named_or_everything(root):
    certs(root, "10.0.0.3", "*.svc")
    first = contents(root)
    certs(root, "10.0.0.3", "--renew", "--days", 20)
    second = contents(root)
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {f"{role}/10.0.0.3/tls.{kind}" for role in Role for kind in ("crt", "key")}
    assert (read_certificates(root / "front/10.0.0.3").expires - datetime.now(UTC)).days == 19
    certs(root, "--renew")
    third = contents(root)
    assert {name for name in second if second[name] == third[name]} == {
        name for name in first if "ca." in name or "cluster.key" in name
    }
    assert read_certificates(root / "engine/_.svc", Role.ENGINE)


def test_an_interrupted_run_is_completed(root):
    certs(root, "10.0.0.3")
    (root / "engine/10.0.0.3/tls.crt").unlink()
    assert certs(root, "10.0.0.3").count("made  ") == 1
    assert read_certificates(root / "engine/10.0.0.3", Role.ENGINE)


def test_certificates_are_listed_and_the_status_tells_if_one_needs_care(root):
    certs(root, "10.0.0.3", "--days", 15)
    told = certs(root, "--check")
    assert "engine/10.0.0.3" in told and "in 14 days" in told
    assert "in 14 days" in certs(root / "front/10.0.0.3", "--check")
    certs(root, "10.0.0.4", "--days", 13)
    assert "in 12 days" in certs(root, "--check", status=1)


def test_a_certificate_that_cannot_be_used_is_listed_with_the_reason(root):
    certs(root, "10.0.0.3")
    (root / "front/10.0.0.3/tls.key").chmod(0o644)
    told = certs(root, "--check", status=1)
    assert "is open to other users" in told and told.count("in 364 days") == 1
    assert "cannot be used" in certs(root, "10.0.0.3")


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        ((), 2, "HOST is missing"),
        (("0.0.0.0",), 2, "every network of the machine"),
        (("10.0.0",), 2, "neither an IP address nor a DNS name"),
        (("10.0.0.3", "--check"), 2, "--check makes nothing"),
        (("10.0.0.3", "--days", "0"), 2, "Invalid value for '--days'"),
        (("--check",), 1, "is not a folder"),
        (("--renew",), 1, "does not exist"),
        ((".".join(["x" * 60] * 4), "--deployment", "long-name"), 2, "more than 253 characters"),
        (("10.0.0.3", "--deployment", "A.B"), 1, "cannot name a deployment"),
    ],
)
def test_wrong_usage_is_refused_in_two_lines(root, words, status, reason):
    told = certs(root, *words, status=status)
    assert reason in told and told.startswith(("error: ", "made ")) and told.count("\n") <= 3
    assert not list(root.rglob("tls.*"))


def test_another_deployment_is_refused(root):
    certs(root, "10.0.0.3")
    assert "is of the deployment tgi, not blue" in certs(root, "10.0.0.4", "--deployment", "blue", status=1)
    assert not (root / "front/10.0.0.4").exists()


def test_a_folder_that_other_users_can_use_is_refused(root):
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    assert "is open to other users" in certs(root, "10.0.0.3", status=1)
    assert contents(root) == {}


@pytest.mark.parametrize("name", ["ca.crt", "ca.key"])
def test_a_ca_of_which_half_is_missing_is_not_made_again(root, name):
    certs(root, "10.0.0.3")
    (root / name).unlink()
    before = contents(root)
    assert f"{name} does not exist" in certs(root, "10.0.0.4", status=1)
    assert contents(root) == before


def test_an_expired_ca_issues_no_certificates(root):
    old = Authority.made("tgi", now=datetime.now(UTC) - timedelta(days=20), days=10).issued
    root.mkdir(mode=0o700)
    (root / "ca.crt").write_bytes(old.certificate)
    (root / "ca.key").write_bytes(old.key)
    (root / "ca.key").chmod(0o600)
    assert "ca.crt expired at" in certs(root, "10.0.0.4", status=1)
    assert not (root / "front").exists()


def test_a_ca_s_key_that_other_users_can_read_is_refused(root):
    certs(root, "10.0.0.3")
    (root / "ca.key").chmod(0o644)
    assert "is open to other users" in certs(root, "10.0.0.4", status=1)


def test_without_the_extra_the_command_names_it(root, monkeypatch):
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    assert certs(root, "10.0.0.3", status=1).splitlines() == [
        "error: certificates need the package cryptography, which is not installed",
        "hint: pip install 'tgi-py[cluster]'",
    ]


def test_the_launcher_s_program_has_the_command(root):
    program = [sys.executable, "-m", "text_generation_launcher.cli", "certs"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    made = subprocess.run([*program, root, "10.0.0.3"], env=environ, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "") and "engine/10.0.0.3" in made.stdout
    wrong = subprocess.run([*program, root, "--dayz", "3"], env=environ, capture_output=True, text=True)
    assert (
        wrong.returncode == 2 and "did you mean --days? `text-generation-launcher certs --help` lists" in wrong.stderr
    )


def test_the_commands_of_the_docs_run_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[3] / "docs/security.md").read_text()
    lines = [line.split() for line in text.splitlines() if line.startswith("text-generation-launcher ")]
    assert len(lines) == 5
    for _, command, *words in lines:
        assert command == "certs"
        certs(*words)
    assert len(list((tmp_path / "tls").glob("*/*/tls.crt"))) == 2 * 3


def test_help_has_every_flag_and_says_where_the_files_are():
    told = " ".join(certs("--help").split())
    for word in ("--days", "--deployment", "--renew", "--check", "DIR/ROLE/HOST", "DIR/ca.key", "1<=x<=3650"):
        assert word in told


def test_all_folders_of_a_deployment_have_one_key_of_the_block_hashes_and_it_is_never_replaced(root):
    certs(root, "10.0.0.3")
    key = read_key(root)
    assert key is not None
    (root / "front/10.0.0.3/cluster.key").unlink()
    certs(root, "10.0.0.3", "10.0.0.4", "--renew")
    folders = [root, *(root / role / host for role in Role for host in ("10.0.0.3", "10.0.0.4"))]
    assert {read_key(folder) for folder in folders} == {key}
    (root / "front/10.0.0.3/cluster.key").write_text("nothing")
    assert "front/10.0.0.3" in (told := certs(root, "--check", status=1)) and "is not a key" in told
