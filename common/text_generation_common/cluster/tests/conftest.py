"""Folders of certificates as `text-generation-launcher certs` makes them."""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest

from text_generation_common.cluster.identity import Identity, Role
from text_generation_common.cluster.issuing import Authority, Issued

HOST = "127.0.0.1"


@dataclass
class Deployment:
    """A CA, and folders with certificates that it has issued."""

    root: Path
    name: str = "tgi"
    authority: Authority = field(init=False)

    def __post_init__(self) -> None:
        self.authority = Authority.made(self.name)

    def issued(self, role: Role, days: int = 30, now: datetime | None = None, host: str = HOST) -> Issued:
        return self.authority.issue(Identity(self.name, role), host, days, now)

    def folder(self, role: Role, issued: Issued | None = None, ca: bytes | None = None) -> Path:
        """The folder of `role`, with the certificates given or with new ones."""
        issued = issued or self.issued(role)
        folder = self.root / self.name / role
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "ca.crt": ca or self.authority.issued.certificate,
            "tls.key": issued.key,
            "tls.crt": issued.certificate,
        }
        for name, data in content.items():
            new = folder / f"{name}.new"
            new.write_bytes(data)
            new.chmod(0o600)
            new.replace(folder / name)
        return folder


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


@pytest.fixture
def foreign(tmp_path: Path) -> Deployment:
    """A deployment of the same name with a CA of its own."""
    return Deployment(tmp_path / "foreign")
