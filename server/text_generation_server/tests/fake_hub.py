"""A fake hub on loopback: the part of the protocol that huggingface_hub and our transfer use, with faults that tests
choose.
"""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RESOLVE = re.compile(r"/(?P<model>.+)/resolve/(?P<revision>[^/]+)/(?P<file>[^?]+)$")
API = re.compile(r"/api/models/(?P<model>.+?)/revision/(?P<revision>[^/?]+)")


@dataclass
class Model:
    revisions: dict[str, dict[str, bytes]]  # for each revision: content by file name
    token: str | None = None

    def commit(self, revision: str) -> str:
        return hashlib.sha1(revision.encode()).hexdigest()

    def files(self, revision: str) -> dict[str, bytes] | None:
        return next((f for name, f in self.revisions.items() if revision in (name, self.commit(name))), None)


@dataclass
class FakeHub:
    models: dict[str, Model] = field(default_factory=dict)
    # (method, file or path, Range header) of each request.
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)  # what clients call themselves
    stall_after: dict[str, int] = field(
        default_factory=dict
    )  # by file: number of bytes after which the answer stops and waits
    cut_after: dict[str, int] = field(
        default_factory=dict
    )  # by file: number of bytes after which the connection is closed, once
    statuses: dict[str, list[int]] = field(default_factory=dict)  # by file: statuses of the next answers to GET
    damage: set[str] = field(default_factory=set)  # files whose first byte is changed in transfer, once
    ignores_range: bool = False
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def gets(self, file: str) -> list[str | None]:
        """The Range header of each GET for the file."""
        return [wanted for method, name, wanted in self.log if method == "GET" and name == file]


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        match = API.match(self.path) or RESOLVE.match(self.path)
        name = match["file"] if match and "file" in match.groupdict() else self.path
        self.hub.log.append((self.command, name, self.headers.get("Range")))
        self.hub.agents.add(self.headers.get("User-Agent", ""))
        if match is None:
            return self.refuse(404, "EntryNotFound")
        model = self.hub.models.get(match["model"])
        if model is None or (model.token and self.headers.get("Authorization") != f"Bearer {model.token}"):
            return self.refuse(401, "RepoNotFound")
        files = model.files(match["revision"])
        if files is None:
            return self.refuse(404, "RevisionNotFound")
        commit = next(model.commit(revision) for revision, held in model.revisions.items() if held is files)
        if match.re is API:
            listing = {"id": match["model"], "sha": commit, "siblings": [{"rfilename": file} for file in files]}
            return self.send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})
        if name not in files:
            return self.refuse(404, "EntryNotFound")
        self.send_file(name, files[name], commit)

    def send_file(self, name: str, content: bytes, commit: str) -> None:
        is_large = name.endswith((".safetensors", ".bin", ".gguf"))
        digest = hashlib.sha256(content) if is_large else hashlib.sha1(content)
        headers = {"ETag": f'"{digest.hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            return self.send(200, content, headers)
        if statuses := self.hub.statuses.get(name):
            return self.refuse(statuses.pop(0), "")
        start = 0
        if (wanted := self.headers.get("Range")) and not self.hub.ignores_range:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if name in self.hub.damage:
            self.hub.damage.remove(name)
            content = bytes([content[0] ^ 1]) + content[1:]
        self.send(206 if "Content-Range" in headers else 200, content[start:], headers, name)

    def send(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = self.hub.stall_after.get(name) or self.hub.cut_after.pop(name, len(body))
        with contextlib.suppress(ConnectionError):  # the test may have killed the client
            self.wfile.write(body[:stop])
        if stop < len(body):
            if name in self.hub.stall_after:
                self.hub.released.wait(30)
            self.close_connection = True

    def refuse(self, status: int, code: str) -> None:
        self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})


@contextlib.contextmanager
def running_hub() -> Iterator[FakeHub]:
    fake = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": fake}))
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield fake
    finally:
        fake.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
