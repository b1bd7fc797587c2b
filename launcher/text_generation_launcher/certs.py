"""`text-generation-launcher certs`: the folder with a deployment's CA, certificates and keys.

    DIR/ca.crt  DIR/ca.key  DIR/cluster.key               the CA; the key of the block hashes
    DIR/ROLE/HOST/{ca.crt,tls.crt,tls.key,cluster.key}    what a process of ROLE on HOST is given

Folders have mode 700, files 600. The package cryptography is imported when the command runs.
"""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from text_generation_common.cluster import block_key
from text_generation_common.cluster.files import folder_name, read_file, require_cryptography
from text_generation_common.cluster.identity import Identity, Role, host_name
from text_generation_common.errors import CredentialsError, WrongUsage
from text_generation_common.flags.declaration import REQUIRED, flag
from text_generation_common.flags.programs import ProgramFlags

if TYPE_CHECKING:
    from text_generation_common.cluster.issuing import Authority

CA, CA_KEY = "ca.crt", "ca.key"
CERTS = ProgramFlags(changes={}, has_variables=False)
DEPLOYMENT = "tgi"
Echo = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CertsFlags:
    dir: str = flag(REQUIRED, "The deployment's folder, which is made if it does not exist.", positional=True)
    host: tuple[str, ...] = flag((), "Addresses or names of machines.", positional=True)
    days: int = flag(365, "Days for which new certificates are valid; a CA is valid for ten years.", min=1, max=3650)
    deployment: str | None = flag(
        None, f"The deployment's name in a new CA, {DEPLOYMENT} when not given; other deployments are refused."
    )
    renew: bool = flag(False, "Replace the certificates and keys of each HOST, or of all without HOST.")
    check: bool = flag(False, "Make nothing: list certificates; the exit status is 1 if one expires soon or is wrong.")


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of one certificate."""

    folder: Path
    name: str  # ROLE/HOST

    @property
    def is_taken(self) -> bool:
        return (self.folder / "tls.crt").exists()  # the last file that is written


def make_or_check(flags: CertsFlags, echo: Echo) -> int:
    """Runs the command, and returns its exit status. CredentialsError or WrongUsage, in one line, if it cannot."""
    if flags.check and (flags.host or flags.renew):
        raise WrongUsage("--check makes nothing: give it without HOST and without --renew")
    if not (flags.check or flags.host or flags.renew):
        raise WrongUsage("HOST is missing: give addresses or names of machines, or --check")
    require_cryptography()
    root = Path(flags.dir)
    try:
        return check(root, echo) if flags.check else make(root, flags, echo)
    except OSError as error:
        raise CredentialsError(f"cannot use {error.filename or root}: {error.strerror}") from None


def make(root: Path, flags: CertsFlags, echo: Echo) -> int:
    hosts = _hosts(flags.host)
    if not root.exists() and not hosts:
        raise CredentialsError(f"{root} does not exist: give the folder of a deployment, or HOST")
    with _claimed(root):
        authority, key = _authority(root, flags.deployment, echo), _block_key(root)
        wanted = [(role, host, _place(root, role, host)) for role in Role for host in hosts]
        if not hosts:
            wanted = [(role, _host_in(place), place) for role, place in _places(root)]
        for role, host, place in wanted:
            is_kept = place.is_taken and not flags.renew
            if not is_kept:
                _issue(authority, Identity(authority.deployment, role), host, flags.days, place.folder)
            if block_key.read_key(place.folder) != key:
                _write(place.folder / block_key.FILE, f"{key}\n".encode())
            _line(echo, "kept" if is_kept else "made", place)
    echo(f"Give each machine {root}/ROLE/HOST of its own, and keep {root / CA_KEY} off them.")
    return 0


def check(root: Path, echo: Echo) -> int:
    """Lists the certificates of a deployment, or the one in a process's own folder."""
    if not root.is_dir():
        raise CredentialsError(f"{root} is not a folder: give the folder of a deployment, or of one certificate")
    places = [place for _, place in _places(root)]
    if (root / "tls.crt").exists():
        places.append(Place(root, str(root)))
    if not places:
        raise CredentialsError(
            f"{root} has no certificates: make them with `text-generation-launcher certs {root} HOST`"
        )
    return 0 if all([_line(echo, "", place) for place in places]) else 1


def _hosts(texts: Iterable[str]) -> list[str]:
    try:
        return list(dict.fromkeys(host_name(text, wildcard=True) for text in texts))
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def _place(root: Path, role: Role, host: str) -> Place:
    name = folder_name(host)
    return Place(root / role / name, f"{role}/{name}")


def _places(root: Path) -> Iterator[tuple[Role, Place]]:
    for role in Role:
        for folder in sorted((root / role).glob("*/")):
            yield role, Place(folder, f"{role}/{folder.name}")


def _host_in(place: Place) -> str:
    """The host in the certificate that is there; the folder's name is not always the host's."""
    from text_generation_common.cluster.certificates import host_of

    return host_of(place.folder)


@contextmanager
def _claimed(root: Path) -> Iterator[None]:
    """Makes the folder, checks that only this user can use it, and keeps a second command out."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise CredentialsError(f"{root} is open to other users, or theirs: give a folder of your own (mode 700)")
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _authority(root: Path, deployment: str | None, echo: Echo) -> "Authority":
    """The CA in `root`, or a new one."""
    from text_generation_common.cluster.issuing import Authority

    try:
        if not (root / CA).exists() and not (root / CA_KEY).exists():
            authority = Authority.made(deployment or DEPLOYMENT)
            _write(root / CA_KEY, authority.issued.key)
            _write(root / CA, authority.issued.certificate)
            echo(f"made  {CA}, {CA_KEY}: deployment {authority.deployment}, until {authority.expires:%Y-%m-%d}")
            return authority
        authority = Authority.read(read_file(root / CA, is_key=False), read_file(root / CA_KEY, is_key=True))
    except (ValueError, TypeError) as error:
        raise CredentialsError(f"{root / CA} with {root / CA_KEY}: {error}: give the folder of a deployment") from None
    if deployment not in (None, authority.deployment):
        raise CredentialsError(
            f"{root} is of the deployment {authority.deployment}, not {deployment}: give another folder"
        )
    if authority.expires <= datetime.now(UTC):
        raise CredentialsError(
            f"{root / CA} expired at {authority.expires.isoformat()}: make a new CA in another folder"
        )
    return authority


def _block_key(root: Path) -> str:
    """The deployment's key of the block hashes, which is made if there is none. It is never replaced: processes that
    have the old key and processes that have the new one would not know each other's hashes."""
    if (key := block_key.read_key(root)) is None:
        key = block_key.new_key()
        _write(root / block_key.FILE, f"{key}\n".encode())
    return key


def _issue(authority: "Authority", identity: Identity, host: str, days: int, folder: Path) -> None:
    try:
        issued = authority.issue(identity, host, days)
    except ValueError as error:
        raise WrongUsage(str(error)) from None
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    # A process that reads between two of these writes finds that the key does not fit, and reads again later.
    _write(folder / CA, authority.issued.certificate)
    _write(folder / "tls.key", issued.key)
    _write(folder / "tls.crt", issued.certificate)


def _write(path: Path, content: bytes) -> None:
    """Replaces the file as a whole."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _line(echo: Echo, done: str, place: Place) -> bool:
    """Prints what a place has. False if its certificate expires soon or cannot be used."""
    from text_generation_common.cluster.certificates import SOON, read_certificates

    state, is_good = "", False
    try:
        expires = read_certificates(place.folder).expires
        left = expires - datetime.now(UTC)
        block_key.read_key(place.folder)
        state, is_good = f"expires {expires:%Y-%m-%d}, in {left.days} days", left > SOON
    except CredentialsError as error:
        state = f"cannot be used: {error.reason}"
    echo(f"{done + '  ' if done else ''}{place.name:<36} {state}")
    return is_good
