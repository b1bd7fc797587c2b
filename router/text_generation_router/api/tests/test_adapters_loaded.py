"""Adapters that are loaded and unloaded while the server runs: by which key, from where, and what becomes of names."""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from text_generation_common.adapters.content import digest_of
from text_generation_common.flags.model import MAX_ADAPTERS
from text_generation_common.link import AdapterNote, LinkEvent, LinkMessage, write_adapters
from text_generation_router.api.common.adapters import ServedAdapters
from text_generation_router.engine.protocol import NO_ANSWER, NOT_READY
from text_generation_router.errors import AdapterUnsettledError, NoSuchAdapterError
from text_generation_router.openapi.document import document_of
from text_generation_router.openapi.operation_json import Interface

ADMIN, CLIENT = hashlib.sha256(b"admin").digest(), hashlib.sha256(b"client").digest()
KEY = {"authorization": "Bearer admin"}
CALLER = {"authorization": "Bearer client", "content-type": "application/json"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Engines:
    """Two engines, of which one may refuse an adapter."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.refusals: dict[str, str] = {}
        self.open: list[str] = []  # the digests of open requests

    async def learn_adapters(self, folders: Mapping[str, str]) -> None:
        self.known |= folders

    async def load_adapter(self, digest: str, folder: str) -> Mapping[str, str]:
        return self.refusals

    async def num_with_adapter(self, digest: str) -> int:
        return self.open.count(digest)


def write(folder: Path, content: str) -> str:
    """The files' digest. What is in them, engines check."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)
    return digest_of(folder)


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    (tmp_path / "allowed").mkdir()
    return tmp_path / "allowed"


@pytest.fixture
def server(make_server: Any, allowed: Path) -> Any:
    server = make_server(
        lora_dirs=str(allowed), admin_key_digest=ADMIN, api_keys={CLIENT: ""}, adapters={"old": "0" * 64}
    )
    server.adapters.engine = Engines()
    return server


def load(server: Any, name: str, path: Path | str, **fields: Any) -> Any:
    return server.post(LOAD, {"lora_name": name, "lora_path": str(path), **fields}, KEY)


def names_of(server: Any) -> list[str]:
    return [model["id"] for model in server.get("/v1/models").json["data"][1:]]


def generate(server: Any, name: str) -> tuple[int, str]:
    status = server.post("/generate", {"inputs": "Hi", "parameters": {"adapter_id": name}}, CALLER).status
    return status, server.engine.asked[-1].request.adapter if status == 200 else ""


def test_an_adapter_is_loaded_asked_for_and_unloaded(server, allowed):
    digest = write(allowed / "a", "1")
    assert generate(server, "new")[0] == 422
    loaded = load(server, "new", allowed / "a")
    assert (loaded.status, loaded.body.decode()) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert names_of(server) == ["old", "new"] and generate(server, "new") == (200, digest)
    assert server.adapters.engine.known == {digest: str(allowed / "a")}
    unloaded = server.post(UNLOAD, {"lora_name": "new"}, KEY)
    assert (unloaded.status, unloaded.body.decode()) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert names_of(server) == ["old"] and generate(server, "new")[0] == 422
    assert server.post(UNLOAD, {"lora_name": "old", "lora_int_id": 7}, KEY).status == 200 and names_of(server) == []
    # A client may mean an adapter that has gone: it is not answered by the model itself.
    body = {"model": "old", "prompt": "Hi"}
    assert server.post("/v1/completions", body, CALLER).status == 404


def test_other_files_under_the_same_name_are_another_adapter(server, allowed):
    one = write(allowed / "a", "1")
    assert load(server, "x", allowed / "a").status == 200
    again = load(server, "x", allowed / "a")
    assert (again.status, "has already been loaded" in again.body.decode()) == (400, True)
    assert load(server, "x", allowed / "a", load_inplace=True).status == 200
    other = write(allowed / "a", "2")
    assert load(server, "x", allowed / "a", load_inplace=False).status == 400 and generate(server, "x")[1] == one
    assert load(server, "x", allowed / "a").status == 200 and generate(server, "x") == (200, other)
    assert server.adapters.engine.known.keys() >= {one, other}, "requests of the first one go on"


@pytest.mark.parametrize("key", ["", "Bearer client", "Bearer admin2"])
@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_only_the_administrators_key_opens_the_routes(server, allowed, key, path):
    write(allowed / "a", "1")
    headers = {"authorization": key} if key else {}
    assert server.post(path, {"lora_name": "old", "lora_path": str(allowed / "a")}, headers).status == 401
    assert names_of(server) == ["old"]


def test_without_folders_or_without_the_key_there_are_no_such_routes(make_server):
    for server in (make_server(admin_key_digest=ADMIN), make_server()):
        assert server.post(LOAD, {"lora_name": "x", "lora_path": "/x"}, KEY).status == 404
        assert LOAD not in server.get("/openapi.json").json["paths"]


def test_paths_lead_into_the_named_folders_or_are_refused(server, allowed, tmp_path):
    write(tmp_path / "outside", "1")
    write(allowed / "a", "1")
    (allowed / "link").symlink_to(tmp_path / "outside")
    (allowed / "inner").symlink_to(allowed / "a")
    (allowed / "loop").symlink_to(allowed / "loop")
    for path in (
        tmp_path / "outside", allowed / "link", allowed / "../outside", "relative", "a\0b", "/", "/proc/self",
        "x" * 9999, f"{allowed}-not", allowed / "loop/x",
    ):  # fmt: skip
        answer = load(server, "x", path)
        assert answer.status == 400 and "\n" not in answer.body.decode() and len(answer.body) < 1000
    assert load(server, "x", allowed / "gone").status == 404
    (allowed / "pickle").mkdir()
    (allowed / "pickle/adapter_model.bin").touch()
    assert "adapter_model.bin is a pickle, which is not read" in load(server, "x", allowed / "pickle").body.decode()
    file = allowed / "a/adapter_model.safetensors"
    file.unlink()
    file.symlink_to(tmp_path / "outside/adapter_model.safetensors")
    answer = load(server, "x", allowed / "a")
    assert answer.status == 400 and "outside of the folders" in answer.body.decode()
    assert names_of(server) == ["old"] and not server.adapters.engine.known
    write(allowed / "b", "1")
    (allowed / "inner").unlink()
    (allowed / "inner").symlink_to(allowed / "b")
    assert load(server, "x", allowed / "inner").status == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400), ([], 422), ({}, 400), ({"lora_name": "x"}, 400), ({"lora_path": "/x"}, 400),
        ({"lora_name": 1, "lora_path": "/x"}, 422), ({"lora_name": "x", "lora_path": "/x", "other": 1}, 422),
        ({"lora_name": "x", "lora_path": "/x", "load_inplace": 1}, 422),
        ({"lora_name": "x", "lora_path": "/x", "lora_int_id": 1}, 422), (b" " * 20_000, 413),
        ({"lora_name": "local/model", "lora_path": "/x"}, 400), ({"lora_name": "a\nb", "lora_path": "/x"}, 400),
        ({"lora_name": "x" * 257, "lora_path": "/x"}, 400),
    ],
)  # fmt: skip
def test_other_bodies_are_refused(server, body, status):
    found = server.post(LOAD, body, KEY).status
    assert found == (400 if status == 422 else status)  # as OpenAI's routes have it
    assert names_of(server) == ["old"]


def test_an_adapter_that_is_not_served_cannot_be_unloaded(server):
    answer = server.post(UNLOAD, {"lora_name": "x"}, KEY)
    assert answer.status == 404 and "The lora adapter 'x' cannot be found." in answer.body.decode()
    assert server.post(UNLOAD, {}, KEY).status == 400


def test_engines_that_refuse_an_adapter_are_named_and_nothing_changes(server, allowed):
    write(allowed / "a", "1")
    server.adapters.engine.refusals = {"engine 2": "the rank is 9"}
    answer = load(server, "x", allowed / "a")
    assert answer.status == 400 and "engine 2: the rank is 9" in answer.body.decode()
    server.adapters.engine.refusals = {"engine 2": NOT_READY, "engine 3": f"{NO_ANSWER}: Deadline Exceeded"}
    assert load(server, "x", allowed / "a").status == 503
    server.adapters.engine.refusals |= {"engine 1": "the rank is 9"}
    assert load(server, "x", allowed / "a").status == 400
    assert names_of(server) == ["old"] and not server.adapters.engine.known


def test_there_are_at_most_as_many_adapters_as_at_the_start(make_server, allowed):
    full = {f"a{number}": "0" * 64 for number in range(MAX_ADAPTERS)}
    server = make_server(lora_dirs=str(allowed), admin_key_digest=ADMIN, adapters=full)
    server.adapters.engine = Engines()
    write(allowed / "a", "1")
    assert load(server, "x", allowed / "a").status == 400 and load(server, "a7", allowed / "a").status == 200


def test_the_page_of_metrics_counts_the_texts_of_a_new_name_and_forgets_one_that_ends(server, allowed):
    write(allowed / "a", "1")
    load(server, "new", allowed / "a")
    generate(server, "new")
    assert 'tgi_adapter_texts{adapter="new"} 1\n' in server.get("/metrics").body.decode()
    server.post(UNLOAD, {"lora_name": "new"}, KEY)
    assert 'adapter="new"' not in server.get("/metrics").body.decode()


def test_the_document_has_the_routes(server):
    document = server.get("/openapi.json").json
    interface = Interface(version="1.2.3", has_keys=True, has_admin=True, loads_adapters=True)
    assert document == document_of(interface) and json.dumps(document)
    assert document["paths"][LOAD]["post"]["security"] == [{"admin_key": []}]


async def test_unloading_waits_for_the_last_request(allowed: Path) -> None:
    served, engine = ServedAdapters({}, [allowed]), Engines()
    served.engine = engine
    digest = write(allowed / "a", "1")
    await served.load("x", str(allowed / "a"), None)
    await served.load("y", str(allowed / "a"), None)
    engine.open = [digest]
    await served.unload("y")  # x is the same adapter
    waiting = asyncio.create_task(served.unload("x"))
    await asyncio.sleep(0.3)
    assert not waiting.done() and not served.digests
    engine.open = []
    await waiting
    with pytest.raises(NoSuchAdapterError):
        await served.unload("x")


class PretendedLine:
    """The line to a launcher that answers as a test says."""

    def __init__(self, file: Path, reason: str = "") -> None:
        self.file, self.reason = file, reason
        self.asked = 0  # the number of the last change
        self.sent: list[LinkMessage] = []
        self.served: ServedAdapters | None = None
        self.notes: dict[str, AdapterNote] = {}

    def send(self, message: LinkMessage) -> None:
        self.sent.append(message)
        assert self.served is not None
        if message.event is LinkEvent.ADAPTER and message.adapter is not None:
            self.notes[message.adapter.name] = message.adapter
            # The late answer to an earlier change.
            self.served.take(LinkMessage(LinkEvent.ADAPTER_SET, self.asked, reason="an earlier one was in vain"))
            self.asked = message.epoch
            write_adapters(str(self.file), [note for note in self.notes.values() if note.digest])
            self.served.take(LinkMessage(LinkEvent.ADAPTERS, len(self.sent), address=str(self.file)))
        if message.event is LinkEvent.ADAPTERS_TAKEN:
            self.served.take(LinkMessage(LinkEvent.ADAPTER_SET, self.asked, reason=self.reason))


async def test_the_launcher_has_the_list_and_its_reason_is_told(allowed: Path, tmp_path: Path) -> None:
    line: Any = PretendedLine(tmp_path / "list")
    served, engine = ServedAdapters({"old": "0" * 64}, [allowed], line), Engines()
    served.engine, line.served = engine, served
    digest = write(allowed / "a", "1")
    await served.load("x", str(allowed / "a"), None)
    assert served.digests == {"x": digest}
    assert engine.known == {digest: str(allowed / "a")}
    await served.unload("x")
    assert served.digests == {} and [message.event for message in line.sent] == [
        LinkEvent.ADAPTER, LinkEvent.ADAPTERS_TAKEN, LinkEvent.ADAPTER, LinkEvent.ADAPTERS_TAKEN,
    ]  # fmt: skip
    line.reason = "Webserver 1 did not take the new list"
    with pytest.raises(AdapterUnsettledError, match="Webserver 1 did not take"):
        await served.load("x", str(allowed / "a"), None)
    await served.close()
