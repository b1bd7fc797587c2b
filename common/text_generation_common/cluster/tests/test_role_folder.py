"""Which certificate of a deployment's tree a process takes."""

import socket
from pathlib import Path

import pytest

from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.role_folder import role_folder
from text_generation_common.errors import CredentialsError


def make(root: Path, *folders: str) -> None:
    for folder in folders:
        (root / folder).mkdir(parents=True)
        (root / folder / "tls.crt").touch()


def test_the_folder_of_one_certificate_is_taken_as_it_is(tmp_path):
    make(tmp_path, "any")
    assert role_folder(tmp_path / "any", Role.ENGINE, "10.0.0.1") == tmp_path / "any"


@pytest.mark.parametrize(
    ("host", "folder"),
    [("10.0.0.1", "10.0.0.1"), ("fd00::1", "fd00--1"), ("e-0.engines.svc", "_.engines.svc"), ("e.svc", "e.svc")],
)
def test_an_engine_takes_that_of_its_address(tmp_path, host, folder):
    make(tmp_path, *(f"engine/{name}" for name in ("10.0.0.1", "fd00--1", "_.engines.svc", "e.svc")), "front/10.0.0.9")
    assert role_folder(tmp_path, Role.ENGINE, host) == tmp_path / "engine" / folder
    with pytest.raises(CredentialsError, match=r"of the role engine for 10\.0\.0\.9"):
        role_folder(tmp_path, Role.ENGINE, "10.0.0.9")


def test_a_front_takes_that_of_its_machine_s_name_or_the_first(tmp_path, monkeypatch):
    make(tmp_path, "front/a", "front/web")
    monkeypatch.setattr(socket, "gethostname", lambda: "WEB")
    monkeypatch.setattr(socket, "getfqdn", lambda: "web.local")
    assert role_folder(tmp_path, Role.FRONT) == tmp_path / "front/web"
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    assert role_folder(tmp_path, Role.FRONT) == tmp_path / "front/a"
    with pytest.raises(CredentialsError, match="neither"):
        role_folder(tmp_path / "front", Role.FRONT)
