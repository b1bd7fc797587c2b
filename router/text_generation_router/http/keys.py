"""API keys: kept as digests, compared in constant time, required on every route that is not registered as open."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from text_generation_router.errors import StartError, UnauthorizedError
from text_generation_router.http.dialects import ErrorDialects, is_anthropics
from text_generation_router.http.errors import error_response
from text_generation_router.metrics.key_usage import OTHER, KeyUsage, key_usage

# A line of the file of keys: the digest of a key, and perhaps the key's name.
LINE = re.compile(r"(?:sha256:)?(?P<digest>[0-9a-f]{64})(?:[ \t]+(?P<name>[\w.-]{1,64}))?", re.ASCII | re.IGNORECASE)
NAME_DIGITS = 16


class OpenRoute(Route):
    """A route that needs no key. Every other route needs a key, including routes that are added later."""


def guarded(
    app: ASGIApp, usages: Mapping[bytes, KeyUsage], routes: Sequence[BaseRoute], dialects: ErrorDialects
) -> ASGIApp:
    """The application, whose requests without a valid key get a 401, before any of the body is read. The routes
    themselves decide which route a request matches, as in the application's router: a separate comparison of paths
    could disagree, and let a request in without a key. `usages`: to what the requests of each key add, by the key's
    digest. `routes`: the application's own list, to which routes are added later.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        digest = allowed_digest(authorization_of(scope), usages)
        if digest is None and not is_open(routes, scope):
            return await error_response(UnauthorizedError(), dialects.of(scope["path"]))(scope, receive, send)
        key_usage.set(usages[digest] if digest is not None else None)
        await app(scope, receive, send)

    return answer


def is_open(routes: Iterable[BaseRoute], scope: Scope) -> bool:
    """Whether the route that Starlette will choose is open: the first route that matches path and method, else the
    first that matches the path.
    """
    partial: BaseRoute | None = None
    for route in routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return isinstance(route, OpenRoute)
        if match is Match.PARTIAL and partial is None:
            partial = route
    return isinstance(partial, OpenRoute)


def authorization_of(scope: Scope) -> bytes:
    """The request's `Authorization`; b"" if there is none, or more than one. Anthropic's clients may send the key as
    `X-Api-Key` instead, which counts if there is no `Authorization`: on Anthropic's routes, and where the header
    `anthropic-version` says that such a client asks, as for /v1/models."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    is_theirs = is_anthropics(scope["path"]) or any(name == b"anthropic-version" for name, _ in scope["headers"])
    if not given and is_theirs:
        given = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
    return given[0] if len(given) == 1 else b""


def allowed_digest(authorization: bytes, digests: Iterable[bytes]) -> bytes | None:
    """The digest of the key, if `authorization` is `Bearer KEY` with a known key. The comparison takes the same time
    for every key."""
    is_bearer, key = _parse(authorization)
    digest = hashlib.sha256(key).digest()
    matches = [hmac.compare_digest(digest, known) for known in digests]
    return digest if any(matches) and is_bearer else None


def name_of_key(authorization: bytes) -> str:
    """A name for the key, equal on all servers, that does not reveal the key; "" if the header is not `Bearer KEY`."""
    is_bearer, key = _parse(authorization)
    return hashlib.sha256(key).hexdigest()[:NAME_DIGITS] if is_bearer and key else ""


def _parse(authorization: bytes) -> tuple[bool, bytes]:
    """Splits the header into (whether the scheme is Bearer, the key)."""
    scheme, _, key = authorization.partition(b" ")
    return scheme.lower() == b"bearer", key.strip(b" \t")


def names_of_keys(keys: Iterable[str], file: str | None) -> dict[bytes, str]:
    """The names of `keys`, and of the keys listed in `file`, by the keys' digests; "" for a key without a name. Raises
    StartError, whose text never shows a key or a digest.
    """
    names = {_digest(f"--api-key number {number}", key): "" for number, key in enumerate(keys, start=1)}
    return names | (_read(Path(file)) if file is not None else {})


def admin_digest_of(key: str | None) -> bytes | None:
    """The digest of the administrators' key. Raises StartError, whose text never shows the key."""
    return None if not key else _digest("--admin-api-key", key)


def _digest(name: str, key: str) -> bytes:
    if not key or not all("!" <= character <= "~" for character in key):
        raise StartError(
            f"{name} is empty or has characters that no header can carry: use visible ASCII without spaces"
        )
    return hashlib.sha256(key.encode()).digest()


def _read(file: Path) -> dict[bytes, str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--api-key-file {file} cannot be read: {error}") from error
    names: dict[bytes, str] = {}
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = LINE.fullmatch(entry)
        if match is None or match["name"] == OTHER:
            raise StartError(
                f"--api-key-file {file}, line {number}: not a SHA-256 digest (64 hexadecimal digits), alone or with a"
                f" name (1 to 64 letters, digits and `._-`, not `{OTHER}`); hash the key with"
                " `printf %s KEY | sha256sum`"
            )
        digest, name = bytes.fromhex(match["digest"]), match["name"] or ""
        if names.setdefault(digest, name) != name:
            raise StartError(f"--api-key-file {file}, line {number}: the key has another name above; give it one name")
    if not names:
        raise StartError(f"--api-key-file {file} has no keys: add the digest of a key, or leave the flag out")
    return names
